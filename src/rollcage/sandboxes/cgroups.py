"""Limits on all processes of a box together: memory, number, CPU time. Version 1 or 2, where we may write."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rollcage.types import SandboxSpec

CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "rollcage-"
_PERIOD_US = 100_000
_OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes", "memory.swap.max")
"""Kernels without swap accounting have no such file."""
_OVERHEAD_PIDS = 32
"""Bubblewrap's own two processes per command are not the command's to pay for."""


@dataclass(frozen=True)
class Hierarchy:
    """A place in one cgroup tree below which we may make groups."""

    version: int
    controllers: tuple[str, ...]
    folder: Path


def places(mountinfo: str, membership: str) -> Iterator[tuple[int, tuple[str, ...], Path, Path]]:
    """(version, controllers, mount point, our own group's folder), read from /proc/self/mountinfo and .../cgroup."""
    own = dict(_memberships(membership))
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split(" ")[3:5]
        kind, _, options = right.split(" ")[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        names = tuple(name for name in CONTROLLERS if name in options.split(",")) if kind == "cgroup" else ()
        path = own.get(names[0] if names else "", "/") if names or kind == "cgroup2" else "/"
        inside = Path("/", path).relative_to(root) if Path("/", path).is_relative_to(root) else Path()
        if kind == "cgroup2":
            yield 2, CONTROLLERS, Path(mount), Path(mount, inside)
        elif names:
            yield 1, names, Path(mount), Path(mount, inside)


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            yield name, path


class Groups:
    """The cgroups of one provider: a folder of its own in each usable tree, a group in it for each box."""

    def __init__(self) -> None:
        """Finds where we may write, and removes what dead processes left there."""
        self._own = f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-{time.monotonic_ns():x}"
        self._trees: list[Hierarchy] = []
        self.close = weakref.finalize(self, _clear, self._trees)
        """Removes our folders; done at the end of the program at the latest."""
        info, membership = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        for version, names, mount, own in places(info, membership):
            missing = tuple(name for name in names if name not in self.controllers)
            tree = _first_usable(version, missing, [own, *_above(own, mount)], self._own) if missing else None
            if tree is not None:
                self._trees.append(tree)

    @property
    def controllers(self) -> tuple[str, ...]:
        """What can be limited here."""
        return tuple(name for tree in self._trees for name in tree.controllers)

    @property
    def versions(self) -> tuple[int, ...]:
        """Which versions are in use."""
        return tuple(sorted({tree.version for tree in self._trees}))

    def open(self, box: str, spec: SandboxSpec) -> Group:
        """A group for one box, with its limits."""
        group = Group()
        try:
            for tree in self._trees:
                wanted = {name for name in tree.controllers if name != "cpu" or spec.cpus is not None}
                if tree.version == 2 or wanted:
                    group.add(tree.folder / box, _settings(tree.version, wanted, spec))
        except OSError:
            group.close()
            raise
        return group

    def forget(self, controllers: Iterable[str]) -> None:
        """Do without these: joining them turned out to be refused."""
        gone = set(controllers)
        for tree in [tree for tree in self._trees if gone & set(tree.controllers)]:
            _remove(tree.folder)
            self._trees.remove(tree)

    def trees(self) -> tuple[Hierarchy, ...]:
        """Where the groups are."""
        return tuple(self._trees)


@dataclass
class Group:
    """The limits of one box: a folder in each tree, and descriptors through which a process joins them."""

    folders: list[Path] = field(default_factory=list)
    joins: list[int] = field(default_factory=list)

    def add(self, folder: Path, settings: Mapping[str, str]) -> None:
        """Make one folder, set its limits, and open the way into it."""
        folder.mkdir()
        self.folders.append(folder)
        for name, value in settings.items():
            if name not in _OPTIONAL or (folder / name).exists():
                (folder / name).write_text(value)
        self.joins.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Remove the folders; every process in them is dead."""
        for fd in self.joins:
            os.close(fd)
        for folder in self.folders:
            _remove(folder)
        self.joins, self.folders = [], []


def _clear(trees: list[Hierarchy]) -> None:
    for tree in trees:
        _remove(tree.folder)
    trees.clear()


def _settings(version: int, wanted: Iterable[str], spec: SandboxSpec) -> dict[str, str]:
    memory, pids = str(spec.memory_mb << 20), str(spec.pids + _OVERHEAD_PIDS)
    quota = str(int((spec.cpus or 0) * _PERIOD_US))
    settings = {
        (1, "memory"): {
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,
            "memory.kmem.tcp.limit_in_bytes": memory,
        },
        (2, "memory"): {"memory.max": memory, "memory.swap.max": "0"},
        (1, "pids"): {"pids.max": pids},
        (2, "pids"): {"pids.max": pids},
        (1, "cpu"): {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota},
        (2, "cpu"): {"cpu.max": f"{quota} {_PERIOD_US}"},
    }
    return {name: value for controller in sorted(wanted) for name, value in settings[version, controller].items()}


def _above(folder: Path, mount: Path) -> list[Path]:
    return [parent for parent in folder.parents if parent.is_relative_to(mount)]


def _first_usable(version: int, names: tuple[str, ...], folders: Iterable[Path], own: str) -> Hierarchy | None:
    for folder in folders:
        _sweep(folder)
        usable = names if version == 1 else _delegated(folder, names)
        if not usable:
            continue
        with suppress(OSError):
            (folder / own).mkdir()
            if version == 2:
                _delegate(folder / own, usable)
            os.close(os.open(folder / own / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
            return Hierarchy(version, usable, folder / own)
        _remove(folder / own)
    return None


def _delegated(folder: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """What groups below this one may limit, once we have asked for it."""
    try:
        offered = (folder / "cgroup.controllers").read_text().split()
        usable = tuple(name for name in names if name in offered)
        passed_on = (folder / "cgroup.subtree_control").read_text().split()
        if not set(usable) <= set(passed_on):
            _delegate(folder, usable)
    except OSError:
        return ()
    return usable


def _delegate(folder: Path, names: Iterable[str]) -> None:
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))


def _sweep(folder: Path) -> None:
    """Remove the groups of owners that are dead."""
    with suppress(OSError):
        for left in folder.glob(f"{_PREFIX}*"):
            pid, _, rest = left.name.removeprefix(_PREFIX).partition("-")
            if pid.isdigit() and _started(int(pid)) != rest.partition("-")[0]:
                _remove(left)


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where there is none. Tells it from a later namesake."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _remove(folder: Path) -> None:
    with suppress(OSError):
        for below in folder.iterdir():
            if below.is_dir():
                _remove(below)
    for _ in range(50):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            # A process that is dead may still be on its way out of the group.
            time.sleep(0.002)
        else:
            return
