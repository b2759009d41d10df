"""The local sandbox: opens boxes whose namespaces are held by descriptors, and whose home is made of layers."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from errno import EMFILE, ENFILE, ENOMEM
from pathlib import Path
from typing import Self

import anyio
import anyio.lowlevel

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.sandboxes.base import check_system, run
from rollcage.sandboxes.box_rpc import RequestRefused
from rollcage.sandboxes.images.catalog import Image, ImageStore
from rollcage.sandboxes.layers import BOX_UID, Layer, LayerStore
from rollcage.sandboxes.local.box import LocalBox, Shape
from rollcage.sandboxes.local.cgroups import Cgroup, Cgroups
from rollcage.sandboxes.local.disks import Disks, discard
from rollcage.sandboxes.local.fork_server import ForkServer
from rollcage.sandboxes.local.machine import remedy
from rollcage.sandboxes.progress import SharedWork, tell
from rollcage.types import BASE, SandboxSpec

_START_TIMEOUT_S = 60


class LocalProvider:
    """Opens boxes on this machine. Its fork server starts with the first box and ends with the provider."""

    name = "local"

    def __init__(self, state_dir: Path, *, uid: int = BOX_UID, on_disk: bool = False) -> None:
        """Layers are kept below `state_dir`. Where we are root, each box runs as a host user of its own, and
        layers are those of the user `uid`; where that cannot be, boxes run as `uid`. Never as root.

        What boxes write below home is kept in memory, and held to its size; with `on_disk`, or where this machine's
        memory disks will not do, in folders below `state_dir`.
        """
        if uid <= 0:
            raise UsageError(f"uid {uid}: a box must run as an ordinary user")
        self._uid = uid if os.geteuid() == 0 else None
        self.layers = LayerStore(state_dir / "layers", owner=self._uid)
        """What boxes are made of."""
        self.images = ImageStore(state_dir / "images", self.layers)
        """What `template` can name."""
        self._making_base = SharedWork()
        self._fork_server: ForkServer | None = None
        self._groups: Cgroups | None = None
        self._on_disk = on_disk
        self._disks: Disks | None = None
        self._starting = anyio.Lock()

    def check(self, spec: SandboxSpec) -> None:
        """A template must be an image that was built or imported."""
        check_system(spec)
        if spec.template:
            self.images.get(spec.template)

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[LocalBox]:
        """A box whose home starts as these layers, topmost first. Closed, with all in it, at the end of the block.

        Below them is the image that the spec's `template` or `system` names; it cannot be removed while the block
        lasts. A base system that is not there yet is made first.
        """
        name = spec.template or (BASE if spec.system == BASE else "")
        if spec.system == BASE and not spec.template and not self.images.has(BASE):
            await self._make_base()
        async with self.images.use(name) as image, self.open_image(image, spec, layers) as box:
            yield box

    @asynccontextmanager
    async def open_image(
        self, image: Image, spec: SandboxSpec, layers: Sequence[Layer] = ()
    ) -> AsyncIterator[LocalBox]:
        """The same for an image that need not have a name yet. Its parts must be held while the block lasts."""
        folders = await self.layers.ensure_all(layers)
        fork_server, groups = await self._start()
        box = await self._build(fork_server, groups, spec, image, [folder.name for folder in folders])
        try:
            yield box
        finally:
            with anyio.CancelScope(shield=True):
                await box.close()

    async def _make_base(self) -> None:
        from rollcage.sandboxes.images.base import ensure_base

        async with self._making_base.alone():
            if not self.images.has(BASE):
                await ensure_base(self, lambda line: tell(f"base system: {line}"))

    def close(self) -> None:
        """End the fork server, and every command that still runs."""
        opened = (self._fork_server, self._groups, self._disks)
        self._fork_server = self._groups = self._disks = None
        for each in opened:
            if each is not None:
                each.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _start(self) -> tuple[ForkServer, Cgroups]:
        async with self._starting:
            if self._fork_server is not None and self._groups is not None and not self._fork_server.gone:
                return self._fork_server, self._groups
            self.close()
            self._fork_server, self._groups = fork_server, groups = ForkServer(self.layers.folder, self._uid), Cgroups()
            try:
                await _join_or_forget(fork_server, groups)
                if self._on_disk:
                    await self._move_to_disk(fork_server)
                await self._try_out(fork_server, groups)
            except BaseException:
                self.close()
                raise
            return fork_server, groups

    async def _move_to_disk(self, fork_server: ForkServer) -> None:
        self._disks = Disks(self.layers.folder, self._uid)
        await self._disks.sweep(fork_server)

    async def _try_out(self, fork_server: ForkServer, groups: Cgroups) -> None:
        """One command in one box: what a machine bars, it bars here, before anybody relies on it."""
        try:
            box = await self._build(fork_server, groups, SandboxSpec(), Image(), [])
        except SetupError as error:
            why = error.__cause__
            if self._disks or not (isinstance(why, RequestRefused) and why.about == "attributes"):
                raise
            await self._move_to_disk(fork_server)
            box = await self._build(fork_server, groups, SandboxSpec(), Image(), [])
        try:
            tried = await run(box, ["true"], timeout_s=_START_TIMEOUT_S)
            said = "" if tried.code == 0 else tried.stderr.text.strip().rpartition("\n")[2] or f"exit {tried.code}"
        except SandboxError as error:
            said = str(error)
        finally:
            with anyio.CancelScope(shield=True):
                await box.close()
        if said:
            raise SetupError(f"no command can be isolated here ({said})", remedy=remedy(said, 0))

    async def _build(
        self, fork_server: ForkServer, groups: Cgroups, spec: SandboxSpec, image: Image, layers: list[str]
    ) -> LocalBox:
        layers = [*layers, *self.images.folders(image, "home")]
        name = f"local-{secrets.token_hex(6)}"
        try:
            group = groups.open(name, spec)
        except OSError as error:
            raise SandboxError(f"cannot open a box: its cgroup cannot be made ({error.strerror})") from error
        folder, uid = self._disks.place(name) if self._disks else "", fork_server.new_user()
        try:
            request = {"layers": layers, "disk": spec.disk_mb << 20, "tmp": spec.tmp_mb << 20, "folder": folder}
            systems = self.images.folders(image, "system")
            system = {"systems": systems, "whole": image.whole, "rooted": spec.writable_system, "uid": uid}
            # A folder must not be made after we gave up on it: nobody would remove it.
            with anyio.CancelScope(shield=bool(folder)):
                answer = await fork_server.ask("build", {**request, **system})
        except RequestRefused as refused:
            group.close()
            if folder:
                with anyio.CancelScope(shield=True):
                    await discard(fork_server, folder)
            if refused.errno in (ENOMEM, EMFILE, ENFILE):
                raise SandboxError(f"cannot open a box: {refused}") from refused
            advice = remedy(refused.about, refused.errno)
            raise SetupError(f"cannot open a box ({refused})", remedy=advice) from refused
        except BaseException:
            group.close()
            raise
        shape = Shape(spec, len(layers), folder, len(systems) if image.whole else 0, uid)
        return LocalBox(name, fork_server, answer.fds, (group, groups.controllers), shape, {**image.env, **spec.env})


async def _join_or_forget(fork_server: ForkServer, groups: Cgroups) -> None:
    """Do without those cgroups that we can make but that a process of the box's user may not enter."""
    for tree in groups.trees():
        group = Cgroup()
        try:
            group.add(tree.folder / "probe", {})
            await fork_server.ask("join", {}, group.joins)
        except (RequestRefused, OSError):
            groups.forget(tree.controllers)
        finally:
            group.close()
