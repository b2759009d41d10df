"""What this machine can do for the local sandbox, found out by trying; and what to do about what it cannot."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rollcage.errors import RollcageError
from rollcage.layers import LayerStore
from rollcage.sandboxes.cgroups import CONTROLLERS, Group, Groups
from rollcage.sandboxes.disks import Disks
from rollcage.sandboxes.keeper import Keeper, Refusal

BOX_UID = 61234
"""The host user that boxes run as where we are root: nobody's, on any usual machine."""

_CONTAINER = (
    "this container bars it; start the container with `--security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined --security-opt systempaths=unconfined` (podman: `unmask=ALL` instead of the last), or use "
    "another sandbox backend"
)
_APPARMOR = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
_SWITCHES = (
    (_APPARMOR, "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces=65536"),
    ("/proc/sys/user/max_net_namespaces", "0", "user.max_net_namespaces=65536"),
    ("/proc/sys/user/max_mnt_namespaces", "0", "user.max_mnt_namespaces=65536"),
)


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    """What was found."""
    remedy: str
    """What to do; empty where nothing need be done."""


def lacks_attributes(step: str) -> bool:
    """Whether a refused step means that a disk keeps no user attributes, as tmpfs does not before Linux 6.6."""
    return "user attributes" in step


def remedy(step: str, number: int) -> str:
    """What makes a refused step work, as exactly as can be told."""
    if number == errno.ENOSYS:
        return f"Linux {os.uname().release} is too old: 5.15 or newer is needed"
    if lacks_attributes(step) or ("overlay" in step and number == errno.EINVAL):
        return (
            f"set ROLLCAGE_HOME to a folder on ext4, xfs or btrfs, or use Linux 6.6 or newer ({os.uname().release} now)"
        )
    if "layers/" in step:
        return "a layer cannot be reached: its folder must be owned by the user that boxes run as"
    for file, bad, setting in _SWITCHES:
        path = Path(file)
        if path.exists() and path.read_text().strip() == bad:
            profile = ", or give this Python an AppArmor profile that allows userns (docs/sandbox.md)"
            return f"run: sudo sysctl -w {setting}{profile if file == _APPARMOR else ''}"
    if number in (errno.ENOSPC, errno.EUSERS):
        return "too many namespaces are in use; run: sudo sysctl -w user.max_user_namespaces=65536"
    if "overlay" in step and number == errno.ENODEV:
        return "run: sudo modprobe overlay"
    return _CONTAINER


def findings(state_dir: Path | None = None) -> list[Finding]:
    """Everything the local sandbox needs or profits from, tried out.

    `state_dir`: where boxes write if memory disks will not do; a temporary folder where none is given.
    """
    found = [_program("bwrap", "bubblewrap", needed=True), _program("rg", "ripgrep", needed=False)]
    found += [_program("nsenter", "util-linux", needed=False), _program("setpriv", "util-linux", needed=False)]
    with tempfile.TemporaryDirectory() as name, _keeper(folder := _layers(state_dir, Path(name))) as keeper:
        if found[0].ok:
            found += _namespaces(keeper, folder)
        found += [_seccomp(), *_cgroups(keeper), _inotify()]
    return found


def _layers(state_dir: Path | None, otherwise: Path) -> Path:
    """Where a keeper works. What is wrong with a state folder that cannot be used is told elsewhere."""
    if state_dir is not None:
        with suppress(RollcageError, OSError):
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            return LayerStore(state_dir / "layers").folder
    return LayerStore(otherwise / "layers").folder


@contextmanager
def _keeper(folder: Path) -> Iterator[Keeper | RollcageError]:
    """A keeper to try things with, or why there is none."""
    try:
        keeper = Keeper(folder, BOX_UID if os.geteuid() == 0 else None)
    except RollcageError as error:
        yield error
        return
    try:
        yield keeper
    finally:
        keeper.close()


def _program(name: str, package: str, *, needed: bool) -> Finding:
    path = shutil.which(name)
    if path is None:
        what = "missing" if needed else "missing (agents may want it)"
        return Finding(name, False, what, f"run: sudo apt-get install {package}")
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
    return Finding(name, True, f"{told.stdout.strip().partition(chr(10))[0]} ({path})", "")


def _namespaces(keeper: Keeper | RollcageError, folder: Path) -> list[Finding]:
    names = ("user namespaces", "overlay in a user namespace", "disk limit")
    bound = "enforced: home is a disk in memory, of the size that was asked for"
    try:
        if isinstance(keeper, RollcageError):
            raise keeper
        try:
            _build(keeper)
        except Refusal as refusal:
            if not lacks_attributes(refusal.step):
                raise
            _build_on_disk(keeper, folder)
            bound = ""
    except Refusal as refusal:
        advice = remedy(refusal.step, refusal.errno)
        if "overlay" in refusal.step or lacks_attributes(refusal.step):
            usable, refused = Finding(names[0], True, "usable", ""), Finding(names[1], False, str(refusal), advice)
            return [usable, refused, Finding(names[2], False, "not tried", advice)]
        barred = f"barred, so nothing can be isolated and nothing will be run ({refusal})"
        return [
            Finding(names[0], False, barred, advice),
            *(Finding(name, False, "not tried", advice) for name in names[1:]),
        ]
    except RollcageError as error:
        return [Finding(name, False, str(error), str(error)) for name in names]
    limit = (
        Finding(names[2], True, bound, "") if bound else Finding(names[2], False, _ON_DISK, "use Linux 6.6 or newer")
    )
    return [*(Finding(name, True, "tried, works", "") for name in names[:2]), limit]


_ON_DISK = (
    "held by looking: memory disks of this kernel keep no user attributes, so homes are below ROLLCAGE_HOME, "
    "and commands that wrote more than they may are killed, but only after the fact"
)


def _build(keeper: Keeper, **more: str) -> None:
    for fd in keeper.ask_now("build", {"layers": [], "disk": 1 << 20, "tmp": 1 << 20, **more}).fds:
        os.close(fd)


def _build_on_disk(keeper: Keeper, folder: Path) -> None:
    disks = Disks(folder, BOX_UID if os.geteuid() == 0 else None)
    place = disks.place("doctor")
    try:
        try:
            _build(keeper, folder=place)
        finally:
            keeper.ask_now("discard", {"folder": place})
    finally:
        disks.close()


def _seccomp() -> Finding:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if actions.exists() and "errno" in actions.read_text():
        return Finding("seccomp", True, "filters can be installed", "")
    return Finding("seccomp", False, "this kernel has no seccomp filters", "use a kernel with CONFIG_SECCOMP_FILTER")


_WITHOUT = {
    "memory": "not enforced for a box as a whole: each process is held to the limit, all of them together are not",
    "pids": "not needed: the number of processes is bounded without it",
    "cpu": "not enforced: `cpus` has no effect, a box may use every processor",
}
"""What it means that a cgroup cannot be used. A box says so too, in its notes."""


def _cgroups(keeper: Keeper | RollcageError) -> list[Finding]:
    groups = Groups()
    try:
        for tree in groups.trees():
            if not _may_join(keeper, tree.folder / "probe"):
                groups.forget(tree.controllers)
        versions = {name: tree.version for tree in groups.trees() for name in tree.controllers}
    finally:
        groups.close()
    return [
        Finding(f"cgroup {name}", True, f"enforced by version {versions[name]}", "")
        if name in versions
        else Finding(f"cgroup {name}", False, _WITHOUT[name], _cgroup_remedy(name))
        for name in CONTROLLERS
    ]


def _may_join(keeper: Keeper | RollcageError, folder: Path) -> bool:
    """Whether a process of the box's user may enter a group that we made."""
    group = Group()
    try:
        group.add(folder, {})
        if isinstance(keeper, Keeper):
            keeper.ask_now("join", {}, group.joins)
    except (RollcageError, OSError):
        return False
    finally:
        group.close()
    return True


def _cgroup_remedy(name: str) -> str:
    if not Path("/run/systemd/system").exists():
        return "run as root, or have root hand a cgroup over to you (docs/sandbox.md)"
    if os.geteuid() == 0:
        return "run: systemd-run --scope -p Delegate=yes rollcage ..."
    also = "" if _login_has(name) else f"; your login must be given the {name} controller first (docs/sandbox.md)"
    return f"run: systemd-run --user --scope -p Delegate=yes rollcage ...{also}"


def _login_has(name: str) -> bool:
    """Whether systemd hands a controller on to this user's own services."""
    login = f"user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service"
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        with suppress(OSError):
            return name in Path(root, login, "cgroup.controllers").read_text().split()
    return False


def _inotify() -> Finding:
    count = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    detail = f"{count} instances for all boxes together, {max(4, count // 8)} for one"
    ok = count >= 512
    return Finding("inotify", ok, detail, "" if ok else "run: sudo sysctl -w fs.inotify.max_user_instances=8192")
