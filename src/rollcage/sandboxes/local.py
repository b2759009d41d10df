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
from rollcage.images.store import Image, ImageStore
from rollcage.layers import Layer, LayerStore
from rollcage.sandboxes.base import run
from rollcage.sandboxes.box import LocalBox, Shape
from rollcage.sandboxes.cgroups import Group, Groups
from rollcage.sandboxes.disks import Disks, discard
from rollcage.sandboxes.keeper import Keeper, Refusal
from rollcage.sandboxes.machine import BOX_UID, lacks_attributes, remedy
from rollcage.types import SandboxSpec

_START_TIMEOUT_S = 60


class LocalProvider:
    """Opens boxes on this machine. Its keeper process starts with the first box and ends with the provider."""

    def __init__(self, state_dir: Path, *, uid: int = BOX_UID, on_disk: bool = False) -> None:
        """Layers are kept below `state_dir`. Where we are root, boxes run as the host user `uid`, never as root.

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
        self._keeper: Keeper | None = None
        self._groups: Groups | None = None
        self._on_disk = on_disk
        self._disks: Disks | None = None
        self._starting = anyio.Lock()

    @property
    def name(self) -> str:
        """`local`."""
        return "local"

    def check(self, spec: SandboxSpec) -> None:
        """A template must be an image that was built or imported."""
        if spec.template:
            self.images.get(spec.template)

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[LocalBox]:
        """A box whose home starts as these layers, topmost first. Closed, with all in it, at the end of the block.

        Below them is the image that the spec's `template` names; it cannot be removed while the block lasts.
        """
        async with self.images.use(spec.template) as image, self.open_image(image, spec, layers) as box:
            yield box

    @asynccontextmanager
    async def open_image(
        self, image: Image, spec: SandboxSpec, layers: Sequence[Layer] = ()
    ) -> AsyncIterator[LocalBox]:
        """The same for an image that need not have a name yet. Its parts must be held while the block lasts."""
        folders = [await self.layers.ensure(layer) for layer in layers]
        keeper, groups = await self._start()
        box = await self._build(keeper, groups, spec, image, [folder.name for folder in folders])
        try:
            yield box
        finally:
            with anyio.CancelScope(shield=True):
                await box.close()

    def close(self) -> None:
        """End the keeper, and every command that still runs."""
        opened = (self._keeper, self._groups, self._disks)
        self._keeper = self._groups = self._disks = None
        for each in opened:
            if each is not None:
                each.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _start(self) -> tuple[Keeper, Groups]:
        async with self._starting:
            if self._keeper is not None and self._groups is not None and not self._keeper.gone:
                return self._keeper, self._groups
            self.close()
            self._keeper, self._groups = keeper, groups = Keeper(self.layers.folder, self._uid), Groups()
            try:
                await _join_or_forget(keeper, groups)
                if self._on_disk:
                    await self._move_to_disk(keeper)
                await self._try_out(keeper, groups)
            except BaseException:
                self.close()
                raise
            return keeper, groups

    async def _move_to_disk(self, keeper: Keeper) -> None:
        self._disks = Disks(self.layers.folder, self._uid)
        await self._disks.sweep(keeper)

    async def _try_out(self, keeper: Keeper, groups: Groups) -> None:
        """One command in one box: what a machine bars, it bars here, before anybody relies on it."""
        try:
            box = await self._build(keeper, groups, SandboxSpec(), Image(), [])
        except SetupError as error:
            if self._disks or not (isinstance(error.__cause__, Refusal) and lacks_attributes(error.__cause__.step)):
                raise
            await self._move_to_disk(keeper)
            box = await self._build(keeper, groups, SandboxSpec(), Image(), [])
        try:
            tried = await run(box, ["true"], timeout_s=_START_TIMEOUT_S)
            said = "" if tried.code == 0 else tried.stderr.text.strip().rpartition("\n")[2] or f"exit {tried.code}"
        except SandboxError as error:
            said = str(error)
        finally:
            with anyio.CancelScope(shield=True):
                await box.close()
        if said:
            raise SetupError(f"no command can be isolated here ({said}): {remedy(said, 0)}")

    async def _build(
        self, keeper: Keeper, groups: Groups, spec: SandboxSpec, image: Image, layers: list[str]
    ) -> LocalBox:
        layers = [*layers, *self.images.folders(image, "home")]
        name = f"local-{secrets.token_hex(6)}"
        try:
            group = groups.open(name, spec)
        except OSError as error:
            raise SandboxError(f"cannot open a box: its cgroup cannot be made ({error.strerror})") from error
        folder = self._disks.place(name) if self._disks else ""
        try:
            order = {"layers": layers, "disk": spec.disk_mb << 20, "tmp": spec.tmp_mb << 20, "folder": folder}
            system = {"systems": self.images.folders(image, "system"), "whole": image.whole}
            # A folder must not be made after we gave up on it: nobody would remove it.
            with anyio.CancelScope(shield=bool(folder)):
                answer = await keeper.ask("build", {**order, **system})
        except Refusal as refusal:
            group.close()
            if folder:
                with anyio.CancelScope(shield=True):
                    await discard(keeper, folder)
            if refusal.errno in (ENOMEM, EMFILE, ENFILE):
                raise SandboxError(f"cannot open a box: {refusal}") from refusal
            advice = remedy(refusal.step, refusal.errno)
            raise SetupError(f"cannot open a box ({refusal}): {advice}") from refusal
        except BaseException:
            group.close()
            raise
        shape = Shape(spec, len(layers), folder)
        return LocalBox(name, keeper, answer.fds, (group, groups.controllers), shape, image.env)


async def _join_or_forget(keeper: Keeper, groups: Groups) -> None:
    """Do without those cgroups that we can make but that a process of the box's user may not enter."""
    for tree in groups.trees():
        group = Group()
        try:
            group.add(tree.folder / "probe", {})
            await keeper.ask("join", {}, group.joins)
        except (Refusal, OSError):
            groups.forget(tree.controllers)
        finally:
            group.close()
