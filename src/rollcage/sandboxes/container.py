"""The container sandbox: opens boxes in docker or podman. Each is a container without network that ends with us."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Self

import anyio

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.layers import Layer, LayerStore
from rollcage.sandboxes.containers.box import OWN_PIDS, ContainerBox
from rollcage.sandboxes.containers.engine import Container, Engine
from rollcage.sandboxes.containers.images import Image, Images
from rollcage.sandboxes.containers.line import Line, listener_at
from rollcage.sandboxes.machine import BOX_UID
from rollcage.types import HOME, SandboxSpec

OWNER = "rollcage.owner"
"""The label that says which process a container belongs to: the path of a folder whose lock that process holds."""
_STATE = "rollcage.state"
_PROGRAM = ("__init__.py", "attendant.py", "furnish.py", "kernel.py", "supervisor.py")
_START = "import sys; sys.path.insert(0, '/run/rollcage'); from inside.attendant import main; main()"
_COMMAND = ("python3", "-I", "-S", "-B", "-c", _START, "/run/rollcage/line/socket", HOME)
_START_TIMEOUT_S = 120
_LOOK_S = 2
_FILES_AT_ONCE = 4096
_MOST_PROCESSES = 32768
"""Of the user that all boxes share. podman lowers its own limit to this; the box's own is a cgroup's."""
_FILES = {
    "passwd": "root:x:0:0:root:/:/usr/sbin/nologin\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    "group": "root:x:0:\nuser:x:1000:\n",
}


class _Started(NamedTuple):
    engine: Engine
    images: Images
    unenforced: frozenset[str]


class ContainerProvider:
    """Opens boxes as containers. It speaks to the engine when the first box is asked for, not before."""

    def __init__(self, state_dir: Path, addresses: Sequence[str]) -> None:
        """The first engine that answers at one of the addresses (`unix:///...`) is used; layers are in `state_dir`."""
        self._state_dir, self._addresses = state_dir, tuple(addresses)
        self._owner: _Owner | None = None
        self._started: _Started | None = None
        self._starting = anyio.Lock()

    @property
    def name(self) -> str:
        """`container`."""
        return "container"

    def check(self, spec: SandboxSpec) -> None:
        """Any image may do; whether it is there is seen when the box is opened."""
        if spec.template != spec.template.strip() or spec.template.startswith("-"):
            raise UsageError(f"template {spec.template!r}: not the name of an image")

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[ContainerBox]:
        """A box whose home starts as these layers, topmost first. Closed, with all in it, at the end of the block."""
        started = await self._start()
        image = await started.images.ensure(spec.template, layers)
        box = await self._build(started, spec, image)
        try:
            await box.furnish(image.layers)
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
                engine = await Engine.open(self._addresses)
                try:
                    await reap(engine, self._state_dir)
                    self._owner = _Owner(self._state_dir)
                    layers = LayerStore(self._state_dir / "layers", owner=BOX_UID if os.geteuid() == 0 else None)
                    images = Images(engine, layers, self._owner.folder)
                    self._started = _Started(engine, images, await engine.unenforced())
                except BaseException:
                    engine.close()
                    self.close()
                    raise
            return self._started

    async def _build(self, started: _Started, spec: SandboxSpec, image: Image) -> ContainerBox:
        assert self._owner is not None
        name = f"rollcage-{secrets.token_hex(6)}"
        folder = self._owner.folder / name
        folder.mkdir(mode=0o755)
        labels = {OWNER: str(self._owner.folder), _STATE: str(self._state_dir)}
        mounts = {**image.mounts, **self._owner.mounts, "/run/rollcage/line": str(folder)}
        wanted = Container(name, image.name, _COMMAND, labels, mounts, _tmpfs(spec), _limits(spec, started.unenforced))
        try:
            with listener_at(folder / "socket") as listener:
                line = await _started_line(started.engine, wanted, listener)
        except TimeoutError as error:
            raise SetupError(
                f"the container of {image.name} does not start: it needs python3 (3.9 or newer, with ctypes), and an "
                "engine on this machine, not in a virtual machine of its own"
            ) from error
        except SandboxError as error:
            if "python3" in str(error):
                raise SetupError(f"the image {spec.template!r} has no python3, which boxes need: {error}") from error
            raise
        finally:
            # Nobody in the box can call here again.
            shutil.rmtree(folder, ignore_errors=True)
        return ContainerBox(name, started.engine, line, spec, image.env)


async def _started_line(engine: Engine, wanted: Container, listener: socket.socket) -> Line:
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
            return await Line.accept(listener)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await engine.remove(wanted.name)
        raise


class _Owner:
    """A folder of this process's own; who finds its lock free knows that the process is dead."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = _owners(state_dir) / secrets.token_hex(8)
        self.folder.mkdir(parents=True, mode=0o700)
        self.folder.parent.chmod(0o700)
        # Seen in containers by their root, whoever that is on this machine; the folder above is closed to others.
        self.folder.chmod(0o755)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        inside = self.folder / "inside"
        inside.mkdir()
        for name in _PROGRAM:
            (inside / name).write_bytes((Path(__file__).parent / "inside" / name).read_bytes())
        for name, text in _FILES.items():
            (self.folder / name).write_text(text)
        for path in (inside, *inside.iterdir(), *(self.folder / name for name in _FILES)):
            path.chmod(0o755 if path.is_dir() else 0o644)
        self.mounts = {
            "/run/rollcage/inside": str(inside),
            **{f"/etc/{name}": str(self.folder / name) for name in _FILES},
        }

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


async def reap(engine: Engine, state_dir: Path) -> list[str]:
    """Remove what dead processes left of boxes whose state was here. Returns the containers' ids."""
    reaped = []
    for name, labels in await engine.owned(_STATE, str(state_dir)):
        if not _alive(Path(labels.get(OWNER, ""))):
            await engine.remove(name)
            reaped.append(name)
    if _owners(state_dir).is_dir():
        for folder in _owners(state_dir).iterdir():
            if not _alive(folder):
                shutil.rmtree(folder, ignore_errors=True)
    return reaped


def _owners(state_dir: Path) -> Path:
    return state_dir / "containers"


def _alive(folder: Path) -> bool:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _tmpfs(spec: SandboxSpec) -> dict[str, str]:
    sizes = {HOME: spec.disk_mb, "/tmp": spec.tmp_mb, "/var/tmp": spec.tmp_mb, "/run": 1}  # noqa: S108 - in the box
    return {place: f"rw,exec,nosuid,nodev,size={size}m" for place, size in sizes.items()}


def _limits(spec: SandboxSpec, unenforced: frozenset[str]) -> dict[str, object]:
    # An engine that may not raise limits fails when it sets its own large ones; so they are said, no larger than ours.
    most = {"nofile": (resource.RLIMIT_NOFILE, _FILES_AT_ONCE), "nproc": (resource.RLIMIT_NPROC, _MOST_PROCESSES)}
    limits: dict[str, object] = {
        "ulimits": {name: _at_most(kind, value) for name, (kind, value) in most.items()},
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


def _at_most(kind: int, value: int) -> int:
    _, most = resource.getrlimit(kind)
    return value if most == resource.RLIM_INFINITY else min(value, most)
