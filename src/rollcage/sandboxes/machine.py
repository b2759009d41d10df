"""What this machine can do for the local sandbox, found out by trying; and what to do about what it cannot."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rollcage.errors import RollcageError
from rollcage.sandboxes.cgroups import CONTROLLERS, Group, Groups
from rollcage.sandboxes.keeper import Keeper, Refusal

BOX_UID = 61234
"""The host user that boxes run as where we are root: nobody's, on any usual machine."""

_CONTAINER = (
    "this container bars it; start the container with `--security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined --security-opt systempaths=unconfined`, or use another sandbox backend"
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


def remedy(step: str, number: int) -> str:
    """What makes a refused step work, as exactly as can be told."""
    if "user attributes" in step or number == errno.ENOSYS:
        return f"Linux {os.uname().release} is too old: 6.6 or newer is needed"
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


def findings() -> list[Finding]:
    """Everything the local sandbox needs or profits from, tried out."""
    found = [_program("bwrap", "bubblewrap", needed=True), _program("rg", "ripgrep", needed=False)]
    found += [_program("nsenter", "util-linux", needed=False), _program("setpriv", "util-linux", needed=False)]
    with tempfile.TemporaryDirectory() as folder, _keeper(Path(folder)) as keeper:
        if found[0].ok:
            found += _namespaces(keeper)
        found += [_seccomp(), *_cgroups(keeper), _inotify()]
    return found


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


def _namespaces(keeper: Keeper | RollcageError) -> list[Finding]:
    names = ("user namespaces", "overlay in a user namespace")
    try:
        if isinstance(keeper, RollcageError):
            raise keeper
        for fd in keeper.ask_now("build", {"layers": [], "disk": 1 << 20, "tmp": 1 << 20}).fds:
            os.close(fd)
    except Refusal as refusal:
        advice = remedy(refusal.step, refusal.errno)
        if "overlay" in refusal.step or "user attributes" in refusal.step:
            return [Finding(names[0], True, "usable", ""), Finding(names[1], False, str(refusal), advice)]
        barred = f"barred, so nothing can be isolated and nothing will be run ({refusal})"
        return [Finding(names[0], False, barred, advice), Finding(names[1], False, "not tried", advice)]
    except RollcageError as error:
        return [Finding(name, False, str(error), str(error)) for name in names]
    return [Finding(name, True, "tried, works", "") for name in names]


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
    also = "; your login must be given the cpu controller first (docs/sandbox.md)" if name == "cpu" else ""
    return f"run: systemd-run --user --scope -p Delegate=yes rollcage ...{also}"


def _inotify() -> Finding:
    count = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    detail = f"{count} instances for all boxes together, {max(4, count // 8)} for one"
    ok = count >= 512
    return Finding("inotify", ok, detail, "" if ok else "run: sudo sysctl -w fs.inotify.max_user_instances=8192")
