"""In a box, as the judged: holds the agent's modules, and does with them what the tests in the judge ask for.

One JSON line for each request and answer. Objects that are no data stay here, and the judge knows them by number.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import inspect
import io
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from rollcage.rollout.checks.inside.wire import LINE, pack, unpack

_BASES = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


class Worker:
    """The conversation, and the objects that the judge has heard of."""

    def __init__(self, source: Any, sink: Any) -> None:
        self._source, self._sink = source, sink
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._loop: Any = None

    def serve(self) -> None:
        """Answer until the judge hangs up."""
        while (request := self._receive()) is not None:
            self._answer(request)

    def _receive(self) -> Any:
        line = self._source.readline(LINE)
        return json.loads(line) if line else None

    def _send(self, message: dict[str, Any]) -> None:
        if isinstance(sys.stdout, io.StringIO) and (said := sys.stdout.getvalue()):
            message["out"] = said[-(1 << 20) :]
        sys.stdout = io.StringIO()
        self._sink.write(json.dumps(message).encode() + b"\n")
        self._sink.flush()

    def _answer(self, request: Any) -> None:
        try:
            act: Callable[..., Any] = getattr(self, f"do_{request['do']}")
            values = [unpack(each, self._known) for each in request["with"]]
            named = {key: unpack(each, self._known) for key, each in request.get("named", {}).items()}
            message = {"ok": pack(act(*values, **named), self._handle)}
        except BaseException as error:  # noqa: BLE001 - whatever it is, the judge is told
            message = {"raised": self._raised(error)}
        self._send(message)

    def _handle(self, value: Any) -> dict[str, Any]:
        number = self._numbers.setdefault(id(value), len(self._objects))
        self._objects[number] = value
        told: dict[str, Any] = {"h": number, "name": str(getattr(type(value), "__name__", ""))}
        if isinstance(value, _BASES):
            told["low"] = True
        if isinstance(value, type) and issubclass(value, Exception):
            told["error"] = self._ancestry(value)
        if inspect.iscoroutine(value):
            told["coroutine"] = True
        return told

    def _known(self, data: Any) -> Any:
        if "h" in data:
            return self._objects[data["h"]]
        return self._callback(data["callback"])

    def _callback(self, number: int) -> Callable[..., Any]:
        def callback(*values: Any, **named: Any) -> Any:
            words = [pack(each, self._handle) for each in values]
            more = {key: pack(each, self._handle) for key, each in named.items()}
            self._send({"call": number, "with": words, "named": more})
            while (message := self._receive()) is not None:
                if "do" in message:
                    self._answer(message)
                elif "ok" in message:
                    return unpack(message["ok"], self._known)
                else:
                    raise getattr(builtins, message["raised"])(*message["args"])
            os._exit(1)

        return callback

    def _ancestry(self, kind: type[BaseException]) -> list[list[Any]]:
        """Its class and those above it, down to the first builtin one; a builtin one has no number."""
        found: list[list[Any]] = []
        for each in kind.__mro__:
            if getattr(builtins, each.__name__, None) is each:
                return [*found, [None, each.__name__, ""]]
            if issubclass(each, BaseException):
                self._numbers.setdefault(id(each), len(self._objects))
                self._objects[self._numbers[id(each)]] = each
                found.append([self._numbers[id(each)], each.__name__, f"{each.__module__}.{each.__qualname__}"])
        return found

    def _raised(self, error: BaseException) -> dict[str, Any]:
        try:
            said = str(error)[:2000]
        except BaseException:  # noqa: BLE001 - its own words may break, too
            said = ""
        args = [pack(each, lambda other: repr(type(other))) for each in error.args]
        return {"error": self._ancestry(type(error)), "args": args, "said": said, "as": self._handle(error)}

    def do_find(self, name: str) -> bool:
        """Whether there is such a module."""
        return importlib.util.find_spec(name) is not None

    def do_load(self, name: str) -> Any:
        """A module."""
        return importlib.import_module(name)

    def do_get(self, owner: Any, name: str) -> Any:
        """An attribute."""
        return getattr(owner, name)

    def do_set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        setattr(owner, name, value)

    def do_delete(self, owner: Any, name: str) -> None:
        """Delete an attribute."""
        delattr(owner, name)

    def do_call(self, owner: Any, /, *values: Any, **named: Any) -> Any:
        """Call it."""
        return owner(*values, **named)

    def do_await(self, owner: Any) -> Any:
        """Run a coroutine to its end."""
        import asyncio

        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(owner)

    def do_operate(self, name: str, *values: Any) -> Any:
        """What an operator gives, of objects that all live here, or of one of them and a key."""
        plain: dict[str, Callable[..., Any]] = {
            each.__name__: each
            for each in (len, iter, next, bool, str, repr, int, float, abs, hash, round, format, dir)
        }
        return (plain.get(name) or getattr(operator, name))(*values)

    def do_lower(self, owner: Any) -> Any:
        """The data of an object whose class descends from a builtin one."""
        return next(base for base in _BASES if isinstance(owner, base))(owner)

    def do_leave(self, owner: Any, name: str | None, said: str) -> None:
        """Leave a `with` block, by an error or without one."""
        error = getattr(builtins, name)(said) if name else None
        type(owner).__exit__(owner, type(error) if error else None, error, None)

    def do_isinstance(self, value: Any, kind: Any) -> bool:
        """Whether one of its objects is of one of its classes."""
        return isinstance(value, kind)


def main(import_from: list[str]) -> None:
    """Serve on private copies of the streams: what code under test prints goes with the answers."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    sys.path.extend(import_from)
    sys.stdout = io.StringIO()
    Worker(source, sink).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
