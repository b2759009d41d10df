"""Boxes in E2B's cloud: opens them, gives them back, and finds again what a crash left there."""

from __future__ import annotations

import asyncio
import os
import secrets
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread

from rollcage.errors import RollcageError, SandboxError, UsageError
from rollcage.locks import Claim, claim, is_claimed
from rollcage.sandboxes.base import SHELL, check_system, refuse_writable_system, run
from rollcage.sandboxes.e2b.box import TTL_S, E2BBox
from rollcage.sandboxes.e2b.cloud import BoxOrder, Cloud, boundary
from rollcage.sandboxes.layers import Layer, LayerStore, box_uid
from rollcage.sandboxes.progress import tell
from rollcage.settings import E2BSettings
from rollcage.types import BASE, HOME, SandboxSpec

if TYPE_CHECKING:
    from e2b import AsyncSandbox

BASE_TEMPLATE = "rollcage"
"""The template that has the programs of the base system; `rollcage image e2b` makes it."""
MARKER = ".rollcage-layers"
"""A file in the home of a template: the names of the layers that are baked into it. A box that is opened has none."""
TAG = "rollcage"
"""The tag of every box of ours; its value names the machine's state folder."""
OWNER_TAG = "rollcage-owner"
"""The tag that names the process that ordered a box."""

_LATE_S = 60.0
_UPLOAD_TIMEOUT_S = 900.0
# A new box's home holds what its template put there for people (shell start-up files); ours hold layers and nothing.
_PREPARE = """
kept=; [ -f "$1" ] && [ ! -L "$1" ] && kept=$(cat -- "$1") && rm -f -- "$1"
if [ -n "$2" ] && [ "$kept" = "$2" ]; then echo baked
else find "$HOME" -mindepth 1 -delete; fi
find /tmp -mindepth 1 -delete 2>/dev/null; true
"""
_UNPACK = 'tar --extract --gzip --no-same-owner --directory "$HOME" --file=-'


class E2BProvider:
    """Opens boxes at E2B. The cloud is first asked when the first box is opened."""

    name = "e2b"

    def __init__(self, settings: E2BSettings, state_dir: Path, *, ttl_s: int = TTL_S) -> None:
        """Layers are kept below `state_dir`, and the names of the living processes that may own boxes.

        `ttl_s`: a box that nobody renews, because we are gone, ends by itself after this long.
        """
        self.cloud = Cloud(settings)
        """The account."""
        self._ttl_s = ttl_s
        self._layers_dir, self._state = state_dir / "layers", state_dir / "e2b"
        self._owner: Claim | None = None
        self._starting = anyio.Lock()
        self._late: set[asyncio.Task[None]] = set()

    def check(self, spec: SandboxSpec) -> None:
        """It needs a key, and its SDK. What its boxes show is what their template has."""
        check_system(spec)
        refuse_writable_system(spec)
        if spec.system == "host":
            raise UsageError("a box at E2B shows its template's system", argument="system", remedy="use base")
        self.cloud.check()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[E2BBox]:
        """A box whose home starts as these layers, topmost first. Closed, with all in it, at the end of the block."""
        self.check(spec)
        await self._start()
        archives = [await self.archive(layer) for layer in layers]
        box = E2BBox(self.cloud, await self._order(spec), spec, ttl_s=self._ttl_s)
        try:
            await _populate_home(box, archives)
            yield box
        finally:
            with anyio.CancelScope(shield=True):
                await box.close()

    async def reap(self) -> list[str]:
        """Give back the boxes that dead processes of this machine left behind; returns their ids."""
        machine, ended = self._machine(), []
        async for box_id, tags in self.cloud.find({TAG: machine}):
            if not self._alive(tags.get(OWNER_TAG, "")):
                await self.cloud.kill(box_id)
                ended.append(box_id)
        return ended

    async def close(self) -> None:
        """Wait for boxes that came too late, and stop being an owner."""
        if self._late:
            await asyncio.wait(self._late, timeout=_LATE_S)
        if self._owner is not None:
            self._owner.release()
            self._owner = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    async def _order(self, spec: SandboxSpec) -> AsyncSandbox:
        """A new box. Who gives up while it is being made does not wait for it, but it does not stay either."""
        assert self._owner is not None
        tags = {TAG: self._machine(), OWNER_TAG: self._owner.path.name}
        ordering = asyncio.create_task(
            self.cloud.create(
                BoxOrder(spec.template or (BASE_TEMPLATE if spec.system == BASE else ""), self._ttl_s, tags)
            )
        )
        try:
            return await asyncio.shield(ordering)
        except asyncio.CancelledError:
            late = asyncio.create_task(self._return(ordering))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            raise

    async def _return(self, ordering: asyncio.Task[AsyncSandbox]) -> None:
        with suppress(RollcageError):
            sandbox = await ordering
            await self.cloud.kill(sandbox.sandbox_id)

    async def _start(self) -> None:
        """Become an owner; what dead ones left is given back first."""
        async with self._starting:
            if self._owner is not None:
                return
            self._owner = claim(self._state / "owners")
            # They end by themselves too; a cloud that does not answer now is told of by whoever opens a box.
            with suppress(RollcageError):
                await self.reap()

    def _machine(self) -> str:
        """A name for this state folder, the same for all who share it."""
        path = self._state / "machine"
        with suppress(FileNotFoundError):
            return path.read_text().strip()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".machine-{secrets.token_hex(6)}")
        draft.write_text(secrets.token_hex(12))
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
        return path.read_text().strip()

    def _alive(self, owner: str) -> bool:
        path = self._state / "owners" / owner
        if not owner.isalnum() or is_claimed(path):
            return owner.isalnum()
        path.unlink(missing_ok=True)
        return False

    async def archive(self, layer: Layer) -> Path:
        """The layer, built and packed once, for sending."""
        [folder] = await LayerStore(self._layers_dir, owner=box_uid()).ensure_all([layer])
        return await anyio.to_thread.run_sync(pack, folder, self._state / "archives")


def pack(folder: Path, archives: Path) -> Path:
    """A layer as a compressed archive, made where there is none yet; it has the layer's name."""
    final = archives / f"{folder.name}.tar.gz"
    if not final.exists():
        archives.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = archives / f".{folder.name}-{secrets.token_hex(6)}"
        try:
            with tarfile.open(draft, "w:gz", compresslevel=3) as archive:
                archive.add(folder, arcname=".")
            draft.rename(final)
        finally:
            draft.unlink(missing_ok=True)
    return final


def marker(archives: Sequence[Path]) -> str:
    """What a template says that has these layers."""
    return "\n".join(archive.name.removesuffix(".tar.gz") for archive in archives)


async def _populate_home(box: E2BBox, archives: Sequence[Path]) -> None:
    """Empty the home of a new box and unpack the layers in it, unless its template has them already."""
    prepare = [*SHELL, _PREPARE, "prepare", f"{HOME}/{MARKER}", marker(archives)]
    ready = await run(box, prepare, cwd="/")
    if ready.code:
        raise SandboxError(f"cannot prepare a box at E2B: {ready.stderr.text.strip() or ready.code}")
    if ready.stdout.text.strip() == "baked":
        return
    for number, archive in enumerate(reversed(archives)):
        tell(f"sending {archive.name} to the box")
        place = f"/tmp/layer-{number}.tar.gz"  # noqa: S108 - in the box, before anything else ran there
        with boundary(f"cannot send {archive.name} to a box at E2B"), archive.open("rb") as file:
            await asyncio.wait_for(box.sandbox.files.write(place, file, user="user"), _UPLOAD_TIMEOUT_S)
        unpack = [*SHELL, f'{_UNPACK} < "$1" && rm -f -- "$1"', "unpack", place]
        done = await run(box, unpack, timeout_s=_UPLOAD_TIMEOUT_S)
        if done.code:
            raise SandboxError(f"cannot unpack {archive.name} in a box at E2B: {done.stderr.text.strip()}")
