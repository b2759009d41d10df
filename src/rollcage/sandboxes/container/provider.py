"""The container sandbox: opens boxes in docker or podman. Each is a container without network that ends with us."""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Self

import anyio

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.locks import abandoned, claim, is_claimed
from rollcage.sandboxes.base import PATH, check_system, refuse_writable_system
from rollcage.sandboxes.container.box import OWN_PIDS, ContainerBox
from rollcage.sandboxes.container.control_channel import ControlChannel, listener_at
from rollcage.sandboxes.container.engine import Container, ContainerEngine, ulimits
from rollcage.sandboxes.container.images import BakedImage, ImageBaker
from rollcage.sandboxes.images.catalog import ImageStore
from rollcage.sandboxes.inside.system import USERS
from rollcage.sandboxes.layers import Layer, LayerStore, box_uid
from rollcage.sandboxes.progress import SharedWork
from rollcage.types import BASE, HOME, SandboxSpec

OWNER = "rollcage.owner"
"""The label that says which process a container belongs to: the path of a folder whose lock that process holds."""
_STATE = "rollcage.state"
_SOURCE = Path(__file__).parents[3]
_PROGRAM = (
    "container/inside/container_init.py",
    "container/inside/home.py",
    "container/inside/supervisor.py",
    "inside/atomic.py",
    "inside/division.py",
    "inside/files.py",
    "inside/kernel.py",
    "inside/processes.py",
    "inside/requests.py",
    "inside/system.py",
)
"""What runs in a container, below `rollcage/sandboxes`; the packages around it are empty there."""
_START = (
    "import sys; sys.path.append('/run/rollcage/inside'); "
    "from rollcage.sandboxes.container.inside.container_init import main; main()"
)
_COMMAND = ("python3", "-I", "-S", "-B", "-c", _START, "/run/rollcage/control/socket", HOME)
_START_TIMEOUT_S = 120
_LOOK_S = 2


class _Started(NamedTuple):
    engine: ContainerEngine
    images: ImageBaker
    unenforced: frozenset[str]


class ContainerProvider:
    """Opens boxes as containers. It speaks to the engine when the first box is asked for, not before."""

    name = "container"

    def __init__(
        self, state_dir: Path, addresses: Sequence[str], *, make_base: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """The first engine that answers at one of the addresses (`unix:///...`) is used; layers are in `state_dir`.

        `make_base`: makes the base system in `state_dir`, where a box wants it and it is not there.
        """
        self._make_base, self._making_base = make_base, SharedWork()
        self._state_dir, self._addresses = state_dir, tuple(addresses)
        self._owner: _Owner | None = None
        self._started: _Started | None = None
        self._starting = anyio.Lock()

    def check(self, spec: SandboxSpec) -> None:
        """Any image may do; whether it is there is seen when the box is opened."""
        check_system(spec)
        refuse_writable_system(spec)
        if spec.template != spec.template.strip() or spec.template.startswith("-"):
            raise UsageError(f"{spec.template!r} is not the name of an image", argument="template")

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[ContainerBox]:
        """A box whose home starts as these layers, topmost first. Closed, with all in it, at the end of the block."""
        started = await self._start()
        if spec.system == BASE and not started.images.has_base() and self._make_base is not None:
            async with self._making_base.alone():
                if not started.images.has_base():
                    await self._make_base()
        image = await started.images.ensure(spec.template, layers, spec.system)
        box = await self._build(started, spec, image)
        try:
            await box.populate_home(image.layers)
            yield box
        finally:
            with anyio.CancelScope(shield=True):
                await box.close()

    def close(self) -> None:
        """Let go of the engine. Containers that are still there end by themselves."""
        started, owner, self._started, self._owner = self._started, self._owner, None, None
        if started is not None:
            started.engine.close()
        if owner is not None:
            owner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _start(self) -> _Started:
        async with self._starting:
            if self._started is None:
                engine = await ContainerEngine.open(self._addresses)
                try:
                    await reap(engine, self._state_dir)
                    self._owner = _Owner(self._state_dir)
                    layers = LayerStore(self._state_dir / "layers", owner=box_uid())
                    kept = ImageStore(self._state_dir / "images", layers)
                    images = ImageBaker(engine, kept, self._owner.folder)
                    self._started = _Started(engine, images, await engine.unenforced())
                except BaseException:
                    engine.close()
                    self.close()
                    raise
            return self._started

    async def _build(self, started: _Started, spec: SandboxSpec, image: BakedImage) -> ContainerBox:
        assert self._owner is not None
        name = f"rollcage-{secrets.token_hex(6)}"
        folder = self._owner.folder / name
        folder.mkdir(mode=0o755)
        labels = {OWNER: str(self._owner.folder), _STATE: str(self._state_dir)}
        mounts = {**image.mounts, **self._owner.mounts, "/run/rollcage/control": str(folder)}
        wanted = Container(name, image.name, _COMMAND, labels, mounts, _tmpfs(spec), _limits(spec, started.unenforced))
        try:
            with listener_at(folder / "socket") as listener:
                channel = await _connect(started.engine, wanted, listener)
        except TimeoutError as error:
            raise SetupError(
                f"the container of {image.name} does not start: it needs python3 (3.9 or newer, with ctypes), and an "
                "engine on this machine, not in a virtual machine of its own"
            ) from error
        except SandboxError as error:
            await started.engine.check_runtime()
            folders = image.env.get("PATH", PATH).split(":")
            if spec.template and await started.engine.lacks_program(image.name, "python3", folders):
                raise SetupError(f"the image {spec.template!r} has no python3, which boxes need: {error}") from error
            raise
        finally:
            # Nobody in the box can call here again.
            shutil.rmtree(folder, ignore_errors=True)
        return ContainerBox(name, started.engine, channel, spec, image.env)


async def _connect(engine: ContainerEngine, wanted: Container, listener: socket.socket) -> ControlChannel:
    try:
        await engine.start(wanted)
        with anyio.fail_after(_START_TIMEOUT_S):
            while True:
                # Once it has called it is heard out: to hang up on it would end it.
                with anyio.move_on_after(_LOOK_S):
                    await anyio.wait_readable(listener)
                    break
                if not await engine.runs(wanted.name):
                    raise TimeoutError
            return await ControlChannel.accept(listener)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await engine.remove(wanted.name)
        raise


class _Owner:
    """A folder that this process claims, with what its containers see of it."""

    def __init__(self, state_dir: Path) -> None:
        self._claim = claim(_owners(state_dir), folder=True)
        self.folder = self._claim.path
        self.folder.parent.chmod(0o700)
        # Seen in containers by their root, whoever that is on this machine; the folder above is closed to others.
        self.folder.chmod(0o755)
        inside = self.folder / "inside"
        inside.mkdir()
        for name in _PROGRAM:
            target = inside / "rollcage/sandboxes" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((_SOURCE / "rollcage/sandboxes" / name).read_bytes())
        for name, text in USERS.items():
            (self.folder / name).write_text(text)
        for path in (inside, *inside.rglob("*"), *(self.folder / name for name in USERS)):
            path.chmod(0o755 if path.is_dir() else 0o644)
        self.mounts = {
            "/run/rollcage/inside": str(inside),
            **{f"/etc/{name}": str(self.folder / name) for name in USERS},
        }

    def close(self) -> None:
        self._claim.release()


async def reap(engine: ContainerEngine, state_dir: Path) -> list[str]:
    """Remove what dead processes left of boxes whose state was here. Returns the containers' ids."""
    reaped = []
    for name, labels in await engine.owned(_STATE, str(state_dir)):
        if not is_claimed(Path(labels.get(OWNER, ""))):
            await engine.remove(name)
            reaped.append(name)
    for folder in abandoned(_owners(state_dir)):
        shutil.rmtree(folder, ignore_errors=True)
    return reaped


def _owners(state_dir: Path) -> Path:
    return state_dir / "containers"


def _tmpfs(spec: SandboxSpec) -> dict[str, str]:
    sizes = {HOME: spec.disk_mb, "/tmp": spec.tmp_mb, "/var/tmp": spec.tmp_mb, "/run": 1}  # noqa: S108 - in the box
    return {place: f"rw,exec,nosuid,nodev,size={size}m" for place, size in sizes.items()}


def _limits(spec: SandboxSpec, unenforced: frozenset[str]) -> dict[str, object]:
    limits: dict[str, object] = {
        "ulimits": ulimits(),
        "shm_size": spec.tmp_mb << 20,
        "security": ["label=disable"] if Path("/sys/fs/selinux/enforce").exists() else [],
    }
    if "memory" not in unenforced:
        limits["mem_limit"] = spec.memory_mb << 20
    if "pids" not in unenforced:
        limits["pids_limit"] = spec.pids + OWN_PIDS
    if "cpus" not in unenforced and spec.cpus is not None:
        limits |= {"cpu_period": 100_000, "cpu_quota": max(1000, round(spec.cpus * 100_000))}
    return limits
