"""In a box, as the judged: takes the order for a run of tests, and tells what came of it.

The nonce came by standard input, and the lines go to a copy of standard output that nothing else knows: what code under
test prints is no report. Code in the same process can still find both.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

Tell = Callable[..., None]


def begin() -> tuple[dict[str, Any], Tell]:
    """The order, and the function that reports; from now on whatever is printed goes to standard error."""
    order: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    nonce, out = order.pop("nonce"), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    write, dumps = os.write, json.dumps

    def tell(**what: object) -> None:
        data = f"{nonce} {dumps(what)}\n".encode()
        while data:
            data = data[write(out, data) :]

    tell(begun=True)
    if "tests" in order:
        lay(order["tests_dir"], order.pop("tests"), fresh=True)
    return order, tell


def lay(folder: str, files: Mapping[str, str], *, fresh: bool = False) -> None:
    """Put files into a folder; whatever stands in their way goes, links themselves and not what they lead to."""
    if fresh and os.path.lexists(folder):
        _remove(folder)
    os.makedirs(folder, exist_ok=True)
    for path, text in files.items():
        place = folder
        *above, name = path.split("/")
        for part in above:
            place = os.path.join(place, part)
            if os.path.islink(place) or (os.path.lexists(place) and not os.path.isdir(place)):
                os.unlink(place)
            os.makedirs(place, exist_ok=True)
        place = os.path.join(place, name)
        if os.path.lexists(place):
            _remove(place)
        with open(place, "x", encoding="utf-8") as file:
            file.write(text)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
