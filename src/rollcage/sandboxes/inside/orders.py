"""What the launcher `untrusted` asks for: a file that says it, and three descriptors of the asker's own.

Whoever asks is in the box, and as hostile as all that is. Standard library only, for Python 3.8 and later.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TOOLS = "/run"
"""Where the judge finds the launcher, the Python module and the socket."""
MOST_AT_ONCE = 64
ASK_S = 10.0
"""So long somebody may be connected without having asked for anything."""
_MOST_BYTES = 2 << 20


class LaunchOrder(NamedTuple):
    """A command that the judge wants to be run as the judged."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    timeout_s: float
    scratch: bool
    network: bool


class OrderTerms(NamedTuple):
    """What holds for all orders of a judge."""

    timeout_s: float
    """How long a command may take whose order says nothing of it."""
    withheld: Sequence[str]
    """Variables that the judged does not get; a name may end in `*`."""


def take_order(fds: Sequence[int], terms: OrderTerms) -> LaunchOrder:
    """The order that came with these descriptors: of what it says, and of three streams."""
    if len(fds) != 4:
        raise ValueError("an order comes with three streams")
    order = read_order(_content(fds[0]), terms)
    if stat.S_ISDIR(os.fstat(fds[1]).st_mode):
        raise ValueError("standard input is a folder")
    return order


def read_order(data: bytes, terms: OrderTerms) -> LaunchOrder:
    """What an order says: fields that end in NUL characters. ValueError where it makes no sense."""
    version, timeout, flags, cwd, count, *words = [os.fsdecode(field) for field in data.split(b"\0")]
    if version != "1" or not 0 < int(count) <= len(words):
        raise ValueError("an order of another kind")
    seconds = float(timeout) if timeout else terms.timeout_s
    if not seconds > 0:
        raise ValueError(f"a time of {seconds:g} s")
    pairs = [word.partition("=") for word in words[int(count) :]]
    env = {name: value for name, _, value in pairs if name and not _is_withheld(name, terms.withheld)}
    for name in ("PATH", "PYTHONPATH"):
        if name in env:
            env[name] = ":".join(entry for entry in env[name].split(":") if entry != TOOLS)
    return LaunchOrder(words[: int(count)], env, cwd, seconds, "s" in flags, "n" not in flags)


def _content(fd: int) -> bytes:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        raise ValueError("its arguments and environment are too long")
    return os.pread(fd, _MOST_BYTES, 0)


def _is_withheld(name: str, names: Sequence[str]) -> bool:
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in names)
