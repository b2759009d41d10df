"""In a box, in the judge: runs a Python test framework with the agent's modules in a worker of the judged."""

from __future__ import annotations

import os
import shutil
import site
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import Any

from rollcage.rollout.checks.inside.judge_worker import NotCarried, WorkerProcess
from rollcage.rollout.checks.inside.proxies import Finder, Proxy
from rollcage.rollout.checks.inside.pytest_run import run as run_pytest
from rollcage.rollout.checks.inside.reporting import begin
from rollcage.rollout.checks.inside.unittest_run import run as run_unittest

_STARTING = frozenset({"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn"})


class NotFrom:
    """A finder: modules in these folders are not there."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._inside = tuple(f"{folder}/" for folder in folders)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """As importlib wants it."""
        spec = PathFinder.find_spec(name, path)
        place = str(spec.origin) if spec else ""
        if place.startswith(self._inside) or os.path.realpath(place).startswith(self._inside):
            raise ModuleNotFoundError(name, name=name)


def find_packages(folders: Sequence[str]) -> None:
    """What Python does when it starts, and was told to leave: a package that is installed as a link to the workdir
    puts that on the path, and a start-up module of the agent's there would run in the judge."""
    sys.meta_path.insert(0, NotFrom(folders))
    site.main()
    del sys.meta_path[0]
    sys.path[:] = [folder for folder in sys.path if not f"{folder}/".startswith(tuple(f"{each}/" for each in folders))]


def keep_out(folders: Sequence[str]) -> None:
    """Nothing from these folders is run in this process or by it: a careless test is told so, and fails."""
    inside = tuple(f"{folder}/" for folder in folders)

    def is_theirs(path: Any) -> bool:
        """A package that is installed as a link leads there under another name."""
        return isinstance(path, str) and path.startswith("/") and f"{os.path.realpath(path)}/".startswith(inside)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            words = values[1] if isinstance(values[1], list | tuple) else [values[0]]
            if not words or os.path.basename(os.fsdecode(words[0])) != "untrusted":
                raise NotCarried("start programs by `untrusted.run`: here they would run beside the judge")
        elif event in _STARTING:
            raise NotCarried("start programs by `untrusted.run`: here they would run beside the judge")
        elif event == "exec" and is_theirs(getattr(values[0], "co_filename", "")):
            raise NotCarried("code of the workdir is not run in the judge; import it as a module")
        elif event in ("import", "ctypes.dlopen") and any(map(is_theirs, values[:2])):
            raise NotCarried("a library of the workdir is not loaded in the judge")

    sys.addaudithook(hook)


def main() -> None:
    """Run the tests of the order."""
    leave = os._exit
    order, tell = begin()
    launcher = shutil.which("untrusted")
    if launcher is None:
        tell(missing="untrusted")
        leave(3)
    outside = [order["workdir"], *order["keep"]]
    find_packages(outside)
    if order["kind"] == "pytest":
        try:
            import pytest  # noqa: F401
        except ImportError:
            tell(missing="pytest")
            leave(3)
    sys.path.append(os.path.dirname(str(launcher)))
    command = [str(launcher), "--timeout", str(order["seconds"]), "--", *order["worker"]]
    worker = WorkerProcess(command, order["workdir"], lambda *told: Proxy(worker, *told))
    keep_out(outside)
    sys.meta_path.insert(0, Finder(worker, outside, order["tests_dir"]))
    run = run_pytest if order["kind"] == "pytest" else run_unittest
    code = run(order["tests_dir"], order["path"], (), tell)
    worker.stop("")
    tell(end=code)
    leave(code)


if __name__ == "__main__":
    main()
