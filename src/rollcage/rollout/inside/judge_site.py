"""Every Python of a plain verifier starts with this: modules that judge are Python's own, and code under test that ends
the process has not passed.

Code in the same process can undo all of it: it stops what is common, and makes nothing `isolated`.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, ModuleType
    from typing import Any

WORK: tuple[str, ...] = ()
"""The folders of the agent's work."""
OWN = frozenset(
    "unittest doctest runpy pdb subprocess importlib traceback linecache inspect argparse difflib contextlib tempfile "
    "shutil pathlib signal asyncio functools collections re json os io sys types typing warnings weakref logging "
    "pprint fnmatch time threading socket pickle copy math operator itertools dataclasses enum".split()
)
"""Modules of Python's own that test runners and verifiers import, and that nobody is asked to write."""
LEFT: frozenset[str] | None = None
"""Names of modules that the agent left; None: not known."""


class OwnFirst:
    """Finds those modules where Python keeps them, whatever lies in the folder that a command was started in."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = list(folders)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As importlib wants it."""
        return PathFinder.find_spec(name, self._folders) if name in OWN and (LEFT is None or name in LEFT) else None


def _is_work(path: object) -> bool:
    return isinstance(path, str) and any(os.path.abspath(path).startswith(folder + "/") for folder in WORK)


def _guard_end() -> None:
    plain, started, first = os._exit, os.getpid(), get_ident()

    def is_theirs() -> bool:
        if os.getpid() != started or _is_work(getattr(sys.modules.get("__main__"), "__file__", None)):
            return False
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not _is_work(frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None or get_ident() != first  # a thread that was given it to run

    def refuse() -> None:
        os.write(2, b"rollcage: code under test ended the process of its verifier\n")
        plain(1)

    def _exit(status: int) -> None:
        if status == 0 and is_theirs():
            refuse()
        plain(status)

    def guarded(become: Callable[..., None]) -> Callable[..., None]:
        def guard(*words: Any, **named: Any) -> None:
            if is_theirs():
                refuse()
            become(*words, **named)

        return guard

    for module in (os, sys.modules["posix"]):
        module._exit = _exit  # type: ignore[attr-defined]
        for name in ("execv", "execve"):
            setattr(module, name, guarded(getattr(module, name)))


def _next_site() -> None:
    """Whatever start-up module the image has besides."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != here])
    if spec and spec.loader and not _is_work(spec.origin):
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    library = os.path.dirname(os.__file__)
    sys.meta_path.insert(
        0, OwnFirst([path for path in sys.path if path.startswith(library) and "-packages" not in path])
    )
    _guard_end()
    _next_site()
