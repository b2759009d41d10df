"""Every Python of a plain verifier starts with this: modules that judge are Python's own, and code under test that ends
the process has not passed.

Code in the same process can undo all of it: it stops what is common, and makes nothing `isolated`.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, ModuleType

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


def _guard_exit() -> None:
    plain, started = os._exit, os.getpid()

    def _exit(status: int) -> None:
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _is_work(frame.f_code.co_filename):
            frame = frame.f_back
        if status == 0 and frame is not None and os.getpid() == started and not _is_work(main):
            os.write(2, b"rollcage: code under test ended the process of its verifier\n")
            status = 1
        plain(status)

    for module in (os, sys.modules["posix"]):
        module._exit = _exit  # type: ignore[attr-defined]


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
    _guard_exit()
    _next_site()
