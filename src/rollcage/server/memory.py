"""Keeps a server that lives for months from holding memory that it does not use."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_ARENA_MAX = -8
"""`M_ARENA_MAX` of glibc."""


def share_arenas() -> None:
    """Let all threads allocate from two places; to be called before there are threads.

    glibc makes one for each thread, up to eight for each core, and what a thread freed in its own is of no use to the
    others. Python holds a lock while it allocates, so nobody waits longer. Other C libraries have no such places.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 2)
