"""In a box, in the judge: what tests see of the agent's modules, while the modules themselves are in the worker.

The rule behind every operator: what the test expects is never handed to the code under test, and the judge compares.
"""

from __future__ import annotations

import importlib.machinery
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

from rollcage.rollout.checks.inside.judge_worker import JudgedFailed, NotCarried, WorkerProcess

T = TypeVar("T")
_LASTING = (int, float, complex, str, bytes, tuple, frozenset)
_TOLD = frozenset({"__name__", "__doc__", "__dict__", "__version__", "__qualname__", "__module__"})


class Proxy:
    """One object over there."""

    __slots__ = ("_data", "_generation", "_low", "_name", "_number", "_origin", "_worker")

    def __init__(self, worker: WorkerProcess, number: int, name: str, low: bool) -> None:
        put = object.__setattr__
        put(self, "_worker", worker)
        put(self, "_generation", worker.generation)
        put(self, "_number", number)
        put(self, "_name", name)
        put(self, "_low", low)
        put(self, "_origin", None)
        put(self, "_data", None)

    def judged_number(self) -> int:
        """Its number over there; in a new worker it is looked for where it was found."""
        if self._generation != self._worker.generation:
            if self._origin is None:
                raise JudgedFailed("what this is went away with the process that held it")
            owner, name = self._origin
            again = getattr(owner, name)
            if not isinstance(again, Proxy):
                raise JudgedFailed(f"{name} is something else now")
            object.__setattr__(self, "_number", again._number)
            object.__setattr__(self, "_generation", self._worker.generation)
        return int(self._number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _TOLD:
            raise AttributeError(name)
        return _found_at(self, name, self._worker.ask("get", self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._worker.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._worker.ask("delete", self, name)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._worker.ask("call", self, *values, named=named)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Proxy):
            return other is self or _exact(self._operate("eq", other), bool)
        if self._low:
            return bool(_lower(self) == other)
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        if isinstance(other, Proxy):
            return other is not self and _exact(self._operate("ne", other), bool)
        if self._low:
            return bool(_lower(self) != other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(_lower(self)) if self._low else id(self)

    def __iter__(self) -> Iterator[Any]:
        return self._operate("iter")  # type: ignore[no-any-return]

    def __next__(self) -> Any:
        return self._operate("next")

    def __len__(self) -> int:
        return _exact(self._operate("len"), int)

    def __bool__(self) -> bool:
        return _exact(self._operate("bool"), bool)

    def __int__(self) -> int:
        return _exact(self._operate("int"), int)

    def __float__(self) -> float:
        return _exact(self._operate("float"), float)

    def __str__(self) -> str:
        return _exact(self._operate("str"), str)

    def __repr__(self) -> str:
        return _exact(self._operate("repr"), str)

    def __format__(self, spec: str) -> str:
        return _exact(self._operate("format", spec), str)

    def __getitem__(self, key: Any) -> Any:
        return self._operate("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._operate("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._operate("delitem", key)

    def __contains__(self, value: Any) -> bool:
        return any(item is value or item == value for item in (_lower(self) if self._low else self))

    def __enter__(self) -> Any:
        return self._worker.ask("get", self, "__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # It learns of an error and cannot make it vanish: the rest of the block, and its asserts, would go with it.
        named = kind is not None and kind.__module__ == "builtins" and issubclass(kind, Exception)
        self._worker.ask("leave", self, kind.__name__ if named else "Exception" if kind else None, str(error))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Proxy) and _exact(self._worker.ask("isinstance", value, self), bool)

    def __await__(self) -> Any:
        raise NotCarried("only coroutines of functions can be awaited")

    def _operate(self, name: str, *more: Any) -> Any:
        return self._worker.ask("operate", name, self, *more)


def _exact(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise JudgedFailed(f"code under test gave a {type(value).__name__} for a {kind.__name__}")
    exact: T = value
    return exact


def _lower(proxy: Proxy) -> Any:
    """The data of an object whose class descends from a builtin one, as it is now.

    What cannot change is asked for once: a number is not above one bound and then below the other.
    """
    if proxy._data is not None:
        return proxy._data
    data = proxy._worker.ask("lower", proxy)
    if isinstance(data, Proxy):
        raise JudgedFailed("code under test gave an object for data")
    if type(data) in _LASTING:
        object.__setattr__(proxy, "_data", data)
    return data


def _found_at(owner: Any, name: str, value: Any) -> Any:
    """Remember where something was found, so that it can be found again in a new worker."""
    lasting = isinstance(owner, StubModule) or (isinstance(owner, Proxy) and owner._origin is not None)
    if isinstance(value, Proxy) and lasting and value._origin is None:
        object.__setattr__(value, "_origin", (owner, name))
    return value


def _binary(name: str, *, swapped: bool) -> Callable[[Proxy, Any], Any]:
    function = getattr(operator, name)

    def operate(self: Proxy, other: Any) -> Any:
        if isinstance(other, Proxy):
            both = (other, self) if swapped else (self, other)
            return self._worker.ask("operate", name, *both)
        if self._low:
            mine = _lower(self)
            return function(other, mine) if swapped else function(mine, other)
        raise NotCarried(f"{name}: a value of the test is not handed to an object of code under test; compare its data")

    return operate


def _unary(name: str) -> Callable[[Proxy], Any]:
    return lambda self: self._operate(name)


for _name in ("lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", _binary(_name, swapped=False))
for _name in "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split():
    _bare = _name.rstrip("_")
    setattr(Proxy, f"__{_bare}__", _binary(_name, swapped=False))
    setattr(Proxy, f"__r{_bare}__", _binary(_name, swapped=True))
for _name in ("neg", "pos", "abs", "invert", "index"):
    setattr(Proxy, f"__{_name}__", _unary(_name))


class StubModule(ModuleType):
    """A module over there."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            raise NotCarried("`from ... import *` would let code under test choose names of the test; name them")
        if name.startswith("__") and name.endswith("__") and name not in _TOLD:
            raise AttributeError(name)
        return _found_at(self, name, _worker_of(self).ask("get", _there(self), name))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) or name.startswith("__"):
            super().__setattr__(name, value)
        else:
            _worker_of(self).ask("set", _there(self), name, value)

    def __delattr__(self, name: str) -> None:
        _worker_of(self).ask("delete", _there(self), name)


def _worker_of(module: StubModule) -> WorkerProcess:
    worker: WorkerProcess = vars(module)["__worker__"]
    return worker


def _there(module: StubModule) -> Any:
    """The module itself, in the worker that runs now."""
    held = vars(module).get("__there__")
    worker = _worker_of(module)
    if held is None or held[0] != worker.generation:
        there = worker.ask("load", module.__name__)
        held = (worker.generation, there)
        vars(module)["__there__"] = held
    return held[1]


class Finder:
    """First of `sys.meta_path`: names that the judge itself does not have become stubs."""

    def __init__(self, worker: WorkerProcess, outside: Sequence[str], tests_dir: str) -> None:
        self._worker, self._outside = worker, tuple(f"{folder}/" for folder in outside)
        self._tests = f"{tests_dir}/"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Where a module comes from; None: from the judge's own folders."""
        parent = name.rpartition(".")[0]
        if parent and not isinstance(sys.modules.get(parent), StubModule):
            return None
        if not parent and (self._trusted(name) or not self._asked_by_a_test()):
            return None
        if not _exact(self._worker.ask("find", name), bool):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def _asked_by_a_test(self) -> bool:
        """What a library would like to have and the judge lacks is not taken from the agent."""
        frame = sys._getframe(2)
        while frame.f_back and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame.f_code.co_filename.startswith(self._tests)

    def _trusted(self, name: str) -> bool:
        if name in sys.stdlib_module_names or name in sys.builtin_module_names:
            return True
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, None)
            if spec and spec.loader:
                return not os.path.realpath(str(spec.origin)).startswith(self._outside)
        return False

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The stub; the module itself is loaded over there."""
        module = StubModule(spec.name)
        vars(module)["__worker__"] = self._worker
        return module

    def exec_module(self, module: StubModule) -> None:
        """Load it over there, so that an error comes now."""
        _there(module)
