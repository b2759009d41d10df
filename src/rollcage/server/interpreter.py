"""Sets habits of the process that would cost a server dearly: two of the interpreter, one of the C library.

They hold for the whole process, so no library code sets them unasked.

A turn is thousands of small tuples that the garbage collector tracks though no cycle can run through them; collecting
after every 700 new objects, it took a third of what it costs to parse and store a turn. And a thread that packs turns
for the log may by default keep all streams waiting for 5 ms before it is asked to let them go on.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

YOUNG = 50_000
"""New objects between two collections: as many as some ten long turns have."""
SWITCH_S = 0.00005
"""How long a thread may keep the others waiting."""

_ARENA_MAX = -8
"""`M_ARENA_MAX` of glibc."""

_usual: list[tuple[tuple[int, int, int], float]] = []


@contextmanager
def tuned_for_streams() -> Iterator[None]:
    """Both habits changed in this process, until the last of these blocks ends. Stricter settings are left alone."""
    collector, switch = gc.get_threshold(), sys.getswitchinterval()
    _usual.append((collector, switch))
    if collector[0]:  # 0: somebody has turned it off
        gc.set_threshold(max(collector[0], YOUNG), *collector[1:])
    sys.setswitchinterval(min(switch, SWITCH_S))
    try:
        yield
    finally:
        # Blocks may end in any order: what was before the first of them comes back with the end of the last.
        collector, switch = _usual[0]
        _usual.pop()
        if not _usual:
            gc.set_threshold(*collector)
            sys.setswitchinterval(switch)


def share_arenas() -> None:
    """Let all threads allocate from two places; to be called before there are threads.

    glibc makes one for each thread, up to eight for each core, and what a thread freed in its own is of no use to the
    others. Python holds a lock while it allocates, so nobody waits longer. Other C libraries have no such places.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 2)
