"""Sets two habits of the interpreter that would cost streams dearly. The server asks for it.

It changes the whole process, so no library code does it unasked.

A turn is thousands of small tuples that the garbage collector tracks though no cycle can run through them; collecting
after every 700 new objects, it took a third of what it costs to parse and store a turn. And a thread that packs turns
for the log may by default keep all streams waiting for 5 ms before it is asked to let them go on.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 50_000
"""New objects between two collections: as many as some ten long turns have."""
SWITCH_S = 0.00005
"""How long a thread may keep the others waiting."""

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
