"""What this machine can do for the local sandbox, found out by trying; and what to do about what it cannot."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rollcage.errors import RollcageError
from rollcage.sandboxes.box_rpc import RequestRefused
from rollcage.sandboxes.inside.orders import TOOLS
from rollcage.sandboxes.layers import BOX_UID, LayerStore, box_uid
from rollcage.sandboxes.local.cgroups import CONTROLLERS, Cgroup, Cgroups
from rollcage.sandboxes.local.disks import Disks
from rollcage.sandboxes.local.fork_server import ForkServer

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


class MachineFinding(NamedTuple):
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    """What was found."""
    remedy: str
    """What to do; empty where nothing need be done."""


def remedy(about: str, number: int) -> str:
    """What makes a refused request work, as exactly as can be told from what it concerned and the kernel's errno."""
    if number == errno.ENOSYS:
        return f"Linux {os.uname().release} is too old: 5.15 or newer is needed"
    # tmpfs keeps no user attributes before Linux 6.6, which overlay needs.
    if about == "attributes" or (about == "overlay" and number == errno.EINVAL):
        return (
            f"set ROLLCAGE_HOME to a folder on ext4, xfs or btrfs, or use Linux 6.6 or newer ({os.uname().release} now)"
        )
    if about == "layer":
        return "a layer cannot be reached: its folder must be owned by the user that boxes run as"
    for file, bad, setting in _SWITCHES:
        path = Path(file)
        if path.exists() and path.read_text().strip() == bad:
            profile = ", or give this Python an AppArmor profile that allows userns (docs/sandbox.md)"
            return f"run: sudo sysctl -w {setting}{profile if file == _APPARMOR else ''}"
    if number in (errno.ENOSPC, errno.EUSERS):
        return "too many namespaces are in use; run: sudo sysctl -w user.max_user_namespaces=65536"
    if about == "overlay" and number == errno.ENODEV:
        return "run: sudo modprobe overlay"
    return _CONTAINER


def findings(state_dir: Path | None = None) -> list[MachineFinding]:
    """Everything the local sandbox needs or profits from, tried out.

    `state_dir`: where boxes write if memory disks will not do; a temporary folder where none is given.
    """
    found = [_program("bwrap", "bubblewrap", needed=True), _program("rg", "ripgrep", needed=False)]
    found += [_program("nsenter", "util-linux", needed=False), _program("setpriv", "util-linux", needed=False)]
    with tempfile.TemporaryDirectory() as name, _fork_server(folder := _layers(state_dir, Path(name))) as fork_server:
        if found[0].ok:
            found += _namespaces(fork_server, folder)
        own = isinstance(fork_server, ForkServer) and fork_server.own_users
        found += [_seccomp(), *_cgroups(fork_server), _inotify(own=own)]
    return found


def _layers(state_dir: Path | None, otherwise: Path) -> Path:
    """Where a fork server works. What is wrong with a state folder that cannot be used is told elsewhere."""
    if state_dir is not None:
        with suppress(RollcageError, OSError):
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            return LayerStore(state_dir / "layers").folder
    return LayerStore(otherwise / "layers").folder


@contextmanager
def _fork_server(folder: Path) -> Iterator[ForkServer | RollcageError]:
    """A fork server to try things with, or why there is none."""
    try:
        fork_server = ForkServer(folder, box_uid())
    except RollcageError as error:
        yield error
        return
    try:
        yield fork_server
    finally:
        fork_server.close()


def _program(name: str, package: str, *, needed: bool) -> MachineFinding:
    path = shutil.which(name)
    if path is None:
        what = "missing" if needed else "missing (agents may want it)"
        return MachineFinding(name, False, what, f"run: sudo apt-get install {package}")
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
    return MachineFinding(name, True, f"{told.stdout.strip().partition(chr(10))[0]} ({path})", "")


def _namespaces(fork_server: ForkServer | RollcageError, folder: Path) -> list[MachineFinding]:
    names = ("user namespaces", "overlay in a user namespace", "disk limit", "judge and judged")
    bound = "enforced: home is a disk in memory, of the size that was asked for"
    try:
        if isinstance(fork_server, RollcageError):
            raise fork_server
        try:
            divided = _build(fork_server)
        except RequestRefused as refused:
            if refused.about != "attributes":
                raise
            divided = _build_on_disk(fork_server, folder)
            bound = ""
    except RequestRefused as refused:
        advice = remedy(refused.about, refused.errno)
        if refused.about in ("overlay", "attributes"):
            usable, overlay = (
                MachineFinding(names[0], True, "usable", ""),
                MachineFinding(names[1], False, str(refused), advice),
            )
            return [usable, overlay, *(MachineFinding(name, False, "not tried", advice) for name in names[2:])]
        barred = f"barred, so nothing can be isolated and nothing will be run ({refused})"
        return [
            MachineFinding(names[0], False, barred, advice),
            *(MachineFinding(name, False, "not tried", advice) for name in names[1:]),
        ]
    except RollcageError as error:
        return [MachineFinding(name, False, str(error), str(error)) for name in names]
    limit = (
        MachineFinding(names[2], True, bound, "")
        if bound
        else MachineFinding(names[2], False, _ON_DISK, "use Linux 6.6 or newer")
    )
    works = "tried, works" + _users(fork_server)
    return [
        MachineFinding(names[0], True, works, ""),
        MachineFinding(names[1], True, "tried, works", ""),
        limit,
        divided,
    ]


def _users(fork_server: ForkServer) -> str:
    """Whose boxes are, where that is for us to choose."""
    if os.geteuid() != 0:
        return ""
    if fork_server.own_users:
        return "; each box has a host user of its own"
    return f"; boxes share the host user {BOX_UID}, and what the kernel allows it (no idmapped mounts for layers here)"


_ON_DISK = (
    "held by looking: memory disks of this kernel keep no user attributes, so homes are below ROLLCAGE_HOME, "
    "and commands that wrote more than they may are killed, but only after the fact"
)


def _build(fork_server: ForkServer, **more: str) -> MachineFinding:
    """Build a box, and try whether it can be divided."""
    uid = fork_server.new_user()
    fds = fork_server.ask_now("build", {"layers": [], "disk": 1 << 20, "tmp": 1 << 20, "uid": uid, **more}).fds
    name = "judge and judged"
    try:
        return _divide(fork_server, fds[:2], name, {"brought": bool(more), "uid": uid})
    except RequestRefused as refused:
        what = f"cannot be kept apart ({refused}): tasks that use `untrusted` are refused"
        return MachineFinding(name, False, what, remedy(refused.about, refused.errno))
    finally:
        for fd in fds:
            os.close(fd)


def _divide(fork_server: ForkServer, fds: list[int], name: str, box: Mapping[str, object]) -> MachineFinding:
    nothing: dict[str, list[str]] = {each: [] for each in ("shared", "covered", "hidden", "sealed", "frozen")}
    stack = {"upper": 0, "layers": 0, **box}
    launcher = {"tools": {}, "compiled": {}, "door": TOOLS, "needs_launcher": False, "unlinked": False}
    request = {**nothing, **stack, **launcher, "tmp": 1 << 20}
    for fd in fork_server.ask_now("divide", request, fds).fds:
        os.close(fd)
    return MachineFinding(name, True, "kept apart: `untrusted` launches code under test over a second root", "")


def _build_on_disk(fork_server: ForkServer, folder: Path) -> MachineFinding:
    disks = Disks(folder, box_uid())
    place = disks.place("doctor")
    try:
        try:
            return _build(fork_server, folder=place)
        finally:
            fork_server.ask_now("discard", {"folder": place})
    finally:
        disks.close()


def _seccomp() -> MachineFinding:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if actions.exists() and "errno" in actions.read_text():
        return MachineFinding("seccomp", True, "filters can be installed", "")
    return MachineFinding(
        "seccomp", False, "this kernel has no seccomp filters", "use a kernel with CONFIG_SECCOMP_FILTER"
    )


_WITHOUT = {
    "memory": "not enforced for a box as a whole: each process is held to the limit, all of them together are not",
    "cpu": "not enforced: `cpus` has no effect, a box may use every processor",
}
"""What it means that a cgroup cannot be used. A box says so too, in its notes. `pids` is bounded without one."""


def _cgroups(fork_server: ForkServer | RollcageError) -> list[MachineFinding]:
    groups = Cgroups()
    try:
        for tree in groups.trees():
            if not _may_join(fork_server, tree.folder / "probe"):
                groups.forget(tree.controllers)
        versions = {name: tree.version for tree in groups.trees() for name in tree.controllers}
    finally:
        groups.close()
    return [_cgroup(name, versions.get(name)) for name in CONTROLLERS]


def _cgroup(name: str, version: int | None) -> MachineFinding:
    if version is not None:
        return MachineFinding(f"cgroup {name}", True, f"enforced by version {version}", "")
    if name not in _WITHOUT:
        return MachineFinding(f"cgroup {name}", True, "none, and none is needed: a limit of each user bounds them", "")
    return MachineFinding(f"cgroup {name}", False, _WITHOUT[name], _cgroup_remedy(name))


def _may_join(fork_server: ForkServer | RollcageError, folder: Path) -> bool:
    """Whether a process of the box's user may enter a group that we made."""
    group = Cgroup()
    try:
        group.add(folder, {})
        if isinstance(fork_server, ForkServer):
            fork_server.ask_now("join", {}, group.joins)
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


def _inotify(*, own: bool) -> MachineFinding:
    count = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    detail = f"{count} instances for all boxes together, {max(4, count // 8)} for one"
    if own:
        detail = f"{count} instances for each box"
    ok = own or count >= 512
    return MachineFinding("inotify", ok, detail, "" if ok else "run: sudo sysctl -w fs.inotify.max_user_instances=8192")
