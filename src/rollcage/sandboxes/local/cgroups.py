"""Limits on all processes of a box together: memory, number, CPU time. Version 1 or 2, where we may write.

Version 2 lets a group pass controllers on to groups below it only while no process is in the group itself. Where our
own group was handed to us (systemd: `Delegate=yes`), its processes, ourselves included, therefore move to a leaf first.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EACCES, EBUSY, ENOENT, EPERM, EROFS
from pathlib import Path

from rollcage.locks import hold, is_claimed
from rollcage.types import SandboxSpec

CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "rollcage-"
_LEAF = "-self"
_PERIOD_US = 100_000
_LEAST_QUOTA_US = 1000
"""The kernel takes no less."""
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
    lock: int | None = None
    """Held as long as we live: those who do not see our process see that."""


def places(
    mountinfo: str, membership: str, wanted: tuple[str, ...] = CONTROLLERS
) -> Iterator[tuple[int, tuple[str, ...], Path, Path]]:
    """(version, controllers, mount point, our own group's folder), read from /proc/self/mountinfo and .../cgroup."""
    own = dict(_memberships(membership))
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split(" ")[3:5]
        kind, _, options = right.split(" ")[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        names = tuple(name for name in wanted if name in options.split(",")) if kind == "cgroup" else ()
        path = own.get(names[0] if names else "", "/") if names or kind == "cgroup2" else "/"
        inside = Path("/", path).relative_to(root) if Path("/", path).is_relative_to(root) else Path()
        if kind == "cgroup2":
            yield 2, wanted, Path(mount), Path(mount, inside)
        elif names:
            yield 1, names, Path(mount), Path(mount, inside)


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            yield name, path


class Cgroups:
    """The cgroups of one provider: a folder of its own in each usable tree, a group in it for each box."""

    def __init__(self, wanted: tuple[str, ...] = CONTROLLERS) -> None:
        """Finds where we may write, and removes what dead processes left there."""
        self._own = f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-{time.monotonic_ns():x}"
        self._trees: list[Hierarchy] = []
        self.close = weakref.finalize(self, _clear, self._trees, os.getpid())
        """Removes our folders; done at the end of the program at the latest."""
        info, membership = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
        for version, names, mount, own in places(info, membership, wanted):
            missing = tuple(name for name in names if name not in self.controllers)
            # Where we moved to a leaf before, its parent is the group that was handed to us.
            start = own.parent if own.name.startswith(_PREFIX) and own.name.endswith(_LEAF) else own
            for folder in {start, *_beside(start, mount)}:
                _sweep(folder)
            tree = _first_usable(version, missing, [start, *_above(start, mount)], self._own) if missing else None
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

    def open(self, box: str, spec: SandboxSpec) -> Cgroup:
        """A group for one box, with its limits."""
        group = Cgroup()
        try:
            for tree in self._trees:
                wanted = {name for name in tree.controllers if name != "cpu" or spec.cpus is not None}
                if tree.version == 2 or wanted:
                    group.add(tree.folder / box, settings_of(tree.version, wanted, spec))
        except OSError:
            group.close()
            raise
        return group

    def forget(self, controllers: Iterable[str]) -> None:
        """Do without these: joining them turned out to be refused."""
        gone = set(controllers)
        for tree in [tree for tree in self._trees if gone & set(tree.controllers)]:
            _give_up(tree)
            self._trees.remove(tree)

    def trees(self) -> tuple[Hierarchy, ...]:
        """Where the groups are."""
        return tuple(self._trees)


@dataclass
class Cgroup:
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

    def killed_by_machine(self) -> bool:
        """Whether the kernel killed a process of this box because the machine, not the box, was out of memory."""
        return any(_machine_oom(folder) for folder in self.folders)

    def close(self) -> None:
        """Remove the folders; every process in them is dead."""
        for fd in self.joins:
            os.close(fd)
        for folder in self.folders:
            _kill(folder)
            _remove(folder)
        self.joins, self.folders = [], []


def _machine_oom(folder: Path) -> bool:
    """Version 2 counts both in `memory.events`; version 1 counts kills, and how often the box's own limit was hit."""
    try:
        if (folder / "memory.events").exists():
            counts = dict(line.split() for line in (folder / "memory.events").read_text().splitlines())
            return int(counts.get("oom_kill", 0)) > 0 and int(counts.get("oom", 0)) == 0
        counts = dict(line.split() for line in (folder / "memory.oom_control").read_text().splitlines())
        return int(counts.get("oom_kill", 0)) > 0 and int((folder / "memory.failcnt").read_text()) == 0
    except (OSError, ValueError):
        return False


def _clear(trees: list[Hierarchy], owner: int) -> None:
    """Not at the end of a process that was forked from the owner: it inherits what is done at the end."""
    if os.getpid() == owner:
        for tree in trees:
            _give_up(tree)
        trees.clear()


def _give_up(tree: Hierarchy) -> None:
    _remove(tree.folder)
    if tree.lock is not None:
        os.close(tree.lock)


def settings_of(version: int, wanted: Iterable[str], spec: SandboxSpec) -> dict[str, str]:
    """What is written to which file of a box's group."""
    memory, pids = str(spec.memory_mb << 20), str(spec.pids + _OVERHEAD_PIDS)
    quota = str(max(_LEAST_QUOTA_US, int((spec.cpus or 0) * _PERIOD_US)))
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
    chosen = [settings.get((version, controller), {}) for controller in sorted(wanted)]
    return {name: value for each in chosen for name, value in each.items()}


def _above(folder: Path, mount: Path) -> list[Path]:
    return [parent for parent in folder.parents if parent.is_relative_to(mount)]


def _beside(folder: Path, mount: Path) -> list[Path]:
    """The groups next to ours: what ran before us in one of them may have died and left its own there."""
    if folder == mount:
        return []
    with suppress(OSError):
        return [path for path in folder.parent.iterdir() if path.is_dir()]
    return []


def _kill(folder: Path) -> None:
    """Version 2 only: whatever is still in the group dies, though nothing should be."""
    with suppress(OSError):
        (folder / "cgroup.kill").write_text("1")


def _first_usable(version: int, names: tuple[str, ...], folders: Iterable[Path], own: str) -> Hierarchy | None:
    for folder in folders:
        _sweep(folder)
        usable = names if version == 1 else _delegated(folder, names, own)
        if not usable:
            continue
        with suppress(OSError):
            (folder / own).mkdir()
            if version == 2:
                _delegate(folder / own, usable)
            os.close(os.open(folder / own / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
            return Hierarchy(version, usable, folder / own, hold(folder / own))
        _remove(folder / own)
    return None


def _delegated(folder: Path, names: tuple[str, ...], own: str) -> tuple[str, ...]:
    """What groups below this one may limit, once we have asked for it."""
    try:
        offered = [name for name in names if name in (folder / "cgroup.controllers").read_text().split()]
        missing = [name for name in offered if name not in _passed_on(folder)]
        for name in missing:
            try:
                _delegate(folder, [name])
            except OSError as error:
                if error.errno == EBUSY and _is_ours(folder):
                    _move_to_leaf(folder, own)
                    _delegate(folder, [name])
                elif error.errno not in (EBUSY, EACCES, EPERM, ENOENT, EROFS):
                    raise
        return tuple(name for name in offered if name in _passed_on(folder))
    except OSError:
        return ()


def _passed_on(folder: Path) -> list[str]:
    return (folder / "cgroup.subtree_control").read_text().split()


def _is_ours(folder: Path) -> bool:
    """Whether we may rearrange the processes of this group: nobody else is in it, or systemd handed it over."""
    pids = (folder / "cgroup.procs").read_text().split()
    if str(os.getpid()) not in pids:
        return False
    try:
        return pids == [str(os.getpid())] or os.getxattr(folder, "user.delegate") == b"1"
    except OSError:
        return False


def _move_to_leaf(folder: Path, own: str) -> None:
    """Make the group's processes members of a leaf below it. It goes with its last process, or with a later sweep."""
    leaf = folder / f"{own}{_LEAF}"
    leaf.mkdir()
    try:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)
    except OSError:
        for pid in (leaf / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (folder / "cgroup.procs").write_text(pid)
        _remove(leaf)
        raise


def _delegate(folder: Path, names: Iterable[str]) -> None:
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))


def _sweep(folder: Path) -> None:
    """Remove the groups of owners that are dead. Processes of other containers are not seen: their locks are."""
    with suppress(OSError):
        for left in folder.glob(f"{_PREFIX}*"):
            pid, _, rest = left.name.removeprefix(_PREFIX).partition("-")
            dead = pid.isdigit() and _started(int(pid)) != rest.partition("-")[0]
            if dead and not _is_lived_in(left) and not is_claimed(left):
                _remove(left)


def _is_lived_in(leaf: Path) -> bool:
    """Whether others still live in a leaf that a dead process made: they were in its group before."""
    return leaf.name.endswith(_LEAF) and bool((leaf / "cgroup.procs").read_text())


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where there is none. Tells it from a later namesake."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        # Nothing else: a process that has no descriptor left to look with must not take everybody for dead.
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
