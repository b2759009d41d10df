"""Builds a box: its namespaces, and in them the root file system that its commands see."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.inside import system as shown
from rollcage.sandboxes.local.inside import home
from rollcage.sandboxes.local.inside.users import enter_user_namespace, lend, put, take_on

FRAME = "/tmp"  # noqa: S108 (every host has it; ours is mounted over it in a mount namespace of our own)
ROOT = "/root"
"""What commands see as /; beside it in the frame, out of their sight: layers, disk, and the host's /proc and /dev."""

PTS, JUDGED_PTS = "/pts", "/judged-pts"
"""Terminals of the box, and of the judged in it."""
MOST_TERMINALS = 128
"""In one box. A machine has 3,072 for all that is not its own: without a bound one box could take them."""
_SMALL = 64 << 10
"""Bytes of a file of the host that is copied and not mounted."""
_SHARE = 8
"""A box may use this part of what all boxes of one host user share."""


class System(NamedTuple):
    """What a box shows beside its home: folders in the working directory, topmost first."""

    folders: Sequence[str] = ()
    whole: bool = False
    """They are a system of their own, and nothing of the host's is shown; else they are laid over the host's."""
    rooted: bool = False
    """It can be written, and its user is root in it."""

    @classmethod
    def of(cls, request: Mapping[str, object]) -> System:
        """As a request says; the host's system where it says nothing."""
        folders = request.get("systems", [])
        assert isinstance(folders, list)
        return cls([str(folder) for folder in folders], bool(request.get("whole")), bool(request.get("rooted")))


class Disk(NamedTuple):
    """What a box may write to."""

    size: int
    """Bytes below home, where that is a disk of its own."""
    tmp: int
    """Bytes in /tmp."""
    folder: str = ""
    """A folder to be made in the working directory, for what is written below home; else it is a disk of its own."""

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Disk:
        """As a request says."""
        return cls(request["disk"], request["tmp"], request.get("folder", ""))


class FileOwners(NamedTuple):
    """Whose a box is, where each has a host user of its own."""

    layers: int
    """The user whose files layers are."""
    box: int
    """The user that the box runs as."""


def build(layers: Sequence[str], disk: Disk, system: System, owners: FileOwners | None = None) -> list[int]:
    """Move this process into a new box; returns descriptors of its user, mount and network namespaces.

    Layers are names in the working directory. It is carried into the new mount namespace, so they are reached even
    where a folder above them is closed to this uid. `owners`: as root; the box becomes its own user's.
    """
    if disk.folder:
        os.mkdir(disk.folder, 0o700)
        os.mkdir(f"{disk.folder}/disk")
    lent: list[int] = []
    written = -1
    if owners:
        lent = lend([*system.folders, *layers], owners.layers, owners.box)
        if disk.folder:
            for folder in (disk.folder, f"{disk.folder}/disk"):
                os.chown(folder, owners.box, owners.box)
            written = kernel.clone_mount(os.open(f"{disk.folder}/disk", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        take_on(owners.box)
    enter_user_namespace(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET)
    kernel.loopback_up()
    if system.rooted:
        with suppress(OSError):  # its user seems to be root, and servers of a whole system listen at port 80
            put("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")
    if not owners:
        _share_fairly()
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", FRAME, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=4m,nr_inodes=4k")
    folders = _bring("systems", system.folders, lent)
    if system.rooted:
        _prepare_root(system.whole, folders)
    elif system.whole:
        _show_own(FRAME + ROOT, folders)
    else:
        _show_hosts(FRAME + ROOT, folders)
    if folders or system.rooted:
        _host_in_frame()
    else:
        for name in (*shown.FOLDERS, "etc"):
            os.symlink(f"{ROOT}/{name}"[1:], f"{FRAME}/{name}")
    os.mkdir(f"{FRAME}/tmp")  # noqa: S108 (bubblewrap wants one to start from)
    for name in ("proc", "dev"):
        os.mkdir(f"{FRAME}/{name}")
        _bind(f"/{name}", f"{FRAME}/{name}")
    for place in (PTS, JUDGED_PTS):
        os.mkdir(FRAME + place)
        options = f"newinstance,ptmxmode=0666,mode=0620,max={MOST_TERMINALS}"
        kernel.mount("devpts", FRAME + place, "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    _bring("layers", layers, lent[len(folders) :])
    if disk.folder:
        os.mkdir(f"{FRAME}/disk")
        if written >= 0:
            _attach(written, f"{FRAME}/disk")
        else:
            kernel.mount(f"./{disk.folder}/disk", f"{FRAME}/disk", flags=kernel.MS_BIND)
        kernel.set_attributes(f"{FRAME}/disk", kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
    kernel.make_root(FRAME)
    systems = len(folders) if system.whole else 0
    home.prepare(disk.size, home.Stack(0, (), len(layers), bool(disk.folder), system.rooted, systems))
    home.empty_tmp(disk.tmp, first=True)
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "mnt", "net")]


def discard(folder: str, *, own: bool = False) -> None:
    """Delete a folder of the working directory that a box wrote to, whatever it made of it.

    `own`: as root; what is in it belongs to the box's own user.
    """
    if not own:
        _empty(folder)
    elif uid := os.lstat(folder).st_uid:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                os.fchdir(inside)  # as root: the folders above it may be closed to the box's user
                take_on(uid)
                _empty(".")
            finally:
                os._exit(0)
        with suppress(ChildProcessError):  # where the kernel reaps for us
            os.waitpid(pid, 0)
    with suppress(FileNotFoundError):
        os.rmdir(folder)


def _empty(folder: str) -> None:
    """In a user namespace of its own: there, no folder that belongs to the box's user can be closed to us."""
    enter_user_namespace()
    if _is_folder(folder):
        for name in os.listdir(folder):
            home.discard(f"{folder}/{name}", folder)


def _share_fairly() -> None:
    # Where all boxes run as one host user, who may hold only so many inotify instances, no box may take them all.
    for limit, ours in (("max_user_instances", "max_inotify_instances"), ("max_user_watches", "max_inotify_watches")):
        with open(f"/proc/sys/fs/inotify/{limit}") as file:
            allowed = int(file.read())
        put(f"/proc/sys/user/{ours}", str(max(4, allowed // _SHARE)))


def _bind(source: str, target: str) -> None:
    kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)


def _bring(kind: str, folders: Sequence[str], lent: Sequence[int]) -> list[str]:
    """Show folders of the working directory in the frame, numbered; returns where they are now.

    `lent`: mounts of them, where there are some.
    """
    places = [f"{FRAME}/{kind}/{number}" for number in range(len(folders))]
    os.mkdir(f"{FRAME}/{kind}")
    for number, (folder, place) in enumerate(zip(folders, places, strict=True)):
        os.mkdir(place)
        if lent:
            _attach(lent[number], place)
        else:
            kernel.mount(f"./{folder}", place, flags=kernel.MS_BIND, about="layer")
    return places


def _attach(tree: int, place: str) -> None:
    target = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.attach_mount(tree, target)
    os.close(target)
    os.close(tree)


def _show_hosts(root: str, added: Sequence[str], *, rooted: bool = False) -> None:
    """The host's system, with what was added laid over it; in `/etc` only what the host does not show there."""
    os.mkdir(root)
    _bind(root, root)
    _skeleton(root, {**(shown.ROOT_USERS if rooted else shown.USERS), **shown.NAMES})
    if rooted:
        os.mkdir(f"{root}{home.ROOT_HOME}")
    os.mkdir(f"{root}/etc/ssl")
    os.mkdir(f"{FRAME}/host")
    os.mkdir(f"{FRAME}/host/nothing")
    for name in shown.FOLDERS:
        over = [f"{folder}/{name}" for folder in added if _is_folder(f"{folder}/{name}")]
        if over and _is_folder(f"/{name}"):
            os.mkdir(f"{root}/{name}")
            _stack([*over, f"/{name}"], f"{root}/{name}")
        else:
            _show_apart(name, f"{root}/{name}")
    _show_etc(f"{root}/etc")
    for folder in added:
        _add_missing(folder, root)
        _add_missing(f"{folder}/etc", f"{root}/etc")
    _seal(root)


def _show_apart(name: str, target: str) -> None:
    """Show a folder of the host's, by an overlay of the box's own if that can be."""
    if not _is_folder(f"/{name}"):
        _mirror(f"/{name}", target)
        return
    os.mkdir(target)
    if not _apart(name, ("",), target):
        _bind(f"/{name}", target)


def _show_etc(etc: str) -> None:
    """Small files are copied: of every mount that a box has, bubblewrap is told many times for each command."""
    place = f"{FRAME}/host/etc"
    os.mkdir(place)
    apart = _apart("etc", shown.ETC, place)
    for name in shown.ETC:
        source, target = f"/etc/{name}", f"{etc}/{name}"
        if not _copied(source, target):
            _mirror(f"{place}/{name}" if apart else source, target)
    if apart:
        kernel.detach(place)


def _copied(source: str, target: str) -> bool:
    try:
        found = os.lstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _SMALL:
            return False
        with open(source, "rb") as file:
            content = file.read()
    except OSError:
        return False
    with open(target, "wb") as file:
        file.write(content)
    return True


def _apart(name: str, wanted: Sequence[str], place: str) -> bool:
    """Show a folder of the host's through an overlay of the box's own; false if what is wanted of it cannot be.

    A watch (inotify) is on a file, however it was reached: without this, a box would see what other boxes open.
    """
    shown_there = tuple(f"/{name}/{part}" for part in wanted)
    with open("/proc/self/mountinfo") as mounts:
        spread = any(line.split()[4].startswith(shown_there) for line in mounts)
    if spread:
        return False  # an overlay shows nothing of what is mounted in it
    try:
        _stack([f"{FRAME}/host/nothing", f"/{name}"], place)
    except kernel.KernelRefused:
        return False
    return True


def _add_missing(folder: str, target: str) -> None:
    if _is_folder(folder):
        for name in os.listdir(folder):
            if not os.path.lexists(f"{target}/{name}"):
                _mirror(f"{folder}/{name}", f"{target}/{name}")


def _show_own(root: str, folders: Sequence[str]) -> None:
    """A system of its own. Ours lies on top: whatever an image has in these places, mounts never land on it."""
    os.mkdir(f"{FRAME}/skeleton")
    _skeleton(f"{FRAME}/skeleton", {**shown.USERS, **shown.NAMES})
    os.mkdir(root)
    _stack([f"{FRAME}/skeleton", *folders], root)
    _seal(root)


def _prepare_root(whole: bool, folders: Sequence[str]) -> None:
    """Put beside the root what a system that can be written is laid over; it is mounted with the home."""
    for name in (ROOT, "/view"):
        os.mkdir(FRAME + name)
    if not whole:
        _show_hosts(FRAME + home.BASE, folders, rooted=True)
        return
    os.mkdir(FRAME + home.SKELETON)
    # Such an image has its own users; one of them is root.
    known = any(os.path.lexists(f"{folder}/etc/passwd") for folder in folders)
    texts = {**shown.NAMES, shown.APT[0]: shown.APT[1]}
    _skeleton(FRAME + home.SKELETON, texts if known else {**shown.ROOT_USERS, **texts})
    os.mkdir(f"{FRAME}{home.SKELETON}{home.ROOT_HOME}")


def _host_in_frame() -> None:
    """Bubblewrap is the host's and starts outside the box: it must find the host's libraries, never an image's."""
    os.mkdir(f"{FRAME}/etc")
    for name in shown.FOLDERS:
        _mirror(f"/{name}", f"{FRAME}/{name}")
    for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d"):
        _mirror(f"/etc/{name}", f"{FRAME}/etc/{name}")


def _skeleton(root: str, texts: Mapping[str, str]) -> None:
    for name in ("dev", "etc", "home", "home/user", "proc", "run", "tmp"):
        os.mkdir(f"{root}/{name}")
    for name, text in texts.items():
        os.makedirs(os.path.dirname(f"{root}/etc/{name}"), exist_ok=True)
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)


def _seal(root: str) -> None:
    kernel.set_attributes(root, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)


def _stack(folders: Sequence[str], target: str) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("system", target, "overlay", flags, f"userxattr,lowerdir={':'.join(folders)}")


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _mirror(source: str, target: str) -> None:
    """Show a host file or folder in the box; a symlink is made anew and leads nowhere if its target is not shown."""
    try:
        mode = os.lstat(source).st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
        return
    if stat.S_ISDIR(mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
    _bind(source, target)
