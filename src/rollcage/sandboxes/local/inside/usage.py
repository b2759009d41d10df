"""How much a box has written to a folder of the host, while its commands may be writing more and hiding it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from rollcage.sandboxes.local.inside.diff import HOME

_DISK = "/disk"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LEAST_BYTES = 4 << 10
"""Of a file or folder, however empty: the host can keep only so many."""
_KEPT_OPEN = 256
"""Folders on the way down that are held by a descriptor; those below are found again as the folder above."""


class _Level(NamedTuple):
    """A folder on the way down."""

    fd: int
    inode: int
    below: list[str]
    """Folders in it that were not looked into yet."""


def usage(first: Iterable[int] = (), network: int = -1) -> int:
    """How much lies on the disk, in bytes. What is moved meanwhile may be missed.

    `first`: the first process of each command that runs. `network`: a descriptor of the network that they share.
    """
    # These first: a file that loses its name meanwhile is missed until the next time, and not counted twice.
    held = [_nameless(pid) for pid in first if _is_in(pid, network)]
    return _named() + sum({inode: size for found in held for inode, size in found.items()}.values())


def _named() -> int:
    """What has a name, however deep."""
    seen: set[int] = set()
    size, level = _measured(os.open(_DISK, _FOLDER), seen)
    total, way = size, [level]
    while way:
        here = way[-1]
        if not here.below:
            way.pop()
            _go_up(here.fd, way)
            continue
        with suppress(OSError):
            size, level = _measured(os.open(here.below.pop(), _FOLDER, dir_fd=here.fd), seen)
            total += size
            way.append(level)
            if len(way) > _KEPT_OPEN:
                os.close(here.fd)
                way[-2] = here._replace(fd=-1)
    return total


def _go_up(fd: int, way: list[_Level]) -> None:
    """Have the last folder of the way open again; where it is no longer the one above, the last that still is."""
    if way and way[-1].fd < 0:
        above = os.open("..", _FOLDER, dir_fd=fd)
        if os.fstat(above).st_ino == way[-1].inode:
            way[-1] = way[-1]._replace(fd=above)
        else:
            os.close(above)
            del way[_KEPT_OPEN - 1 :]
    os.close(fd)


def _measured(fd: int, seen: set[int]) -> tuple[int, _Level]:
    """A folder with the files in it. What was met before, under another name or before it was moved, is `seen`."""
    own = os.fstat(fd)
    if own.st_ino in seen:
        return 0, _Level(fd, own.st_ino, [])
    seen.add(own.st_ino)
    total, below = max(_LEAST_BYTES, own.st_blocks * 512), []
    with suppress(OSError), os.scandir(fd) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
                    continue
                found = entry.stat(follow_symlinks=False)
                if found.st_ino not in seen:
                    total += max(_LEAST_BYTES, found.st_blocks * 512)
                if found.st_nlink > 1:
                    seen.add(found.st_ino)
    return total, _Level(fd, own.st_ino, below)


def _is_in(pid: int, network: int) -> bool:
    """Whether this is still a process of the box: it may be dead, and its number another's."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.fstat(network))
    except OSError:
        return False


def _nameless(first: int) -> dict[tuple[int, int], int]:
    """Sizes of the files that processes of a command have open and that have no name any more."""
    found: dict[tuple[int, int], int] = {}
    processes = f"/proc/{first}/root/proc"  # as the command sees it: its own
    with suppress(OSError):
        for number in filter(str.isdigit, os.listdir(processes)):
            with suppress(OSError):
                for name in os.listdir(f"{processes}/{number}/fd"):
                    _add_nameless(f"{processes}/{number}/fd/{name}", found)
    return found


def _add_nameless(link: str, found: dict[tuple[int, int], int]) -> None:
    with suppress(OSError):
        if os.readlink(link).startswith(f"{HOME}/"):
            held = os.stat(link)
            if not held.st_nlink:
                found[held.st_dev, held.st_ino] = held.st_blocks * 512
