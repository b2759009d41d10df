"""In a box, in the judge: starts the worker that holds the agent's modules, and asks it, within bounds.

What comes back is data, a number of an object over there, or a builtin exception by its name. A worker that dies, hangs
or talks nonsense fails the test that asked; the next test gets a new one.
"""

from __future__ import annotations

import builtins
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollcage.rollout.checks.inside.wire import LINE, pack, unpack

CALL_S = 20.0
"""How long one request may take."""
_STEP = ("operate", "next")
"""The request that may be answered with the end of an iteration: elsewhere, `all(map(calc.check, values))` is true."""


class JudgedFailed(BaseException):
    """Code under test died, hung, left or talked nonsense. No `Exception`: no test may take it for one it expects."""


class NotCarried(BaseException):
    """A test asks for something that a proxied check cannot do without trusting the code under test."""


class JudgedError:
    """Mixed into exceptions of the agent's own classes: they say what they said over there."""

    said = ""
    judged: Any = None

    def __str__(self) -> str:
        return self.said

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.judged is None:
            raise AttributeError(name)
        return getattr(self.judged, name)


class WorkerProcess:
    """One worker after the other; `generation` counts them."""

    def __init__(self, command: list[str], cwd: str, make_proxy: Callable[..., Any]) -> None:
        self._command, self._cwd, self._make = command, cwd, make_proxy
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._buffer = b""
        self._callbacks: list[Callable[..., Any]] = []
        self._classes: dict[tuple[str, type[Exception]], type[Exception]] = {}
        self._proxies: dict[int, Any] = {}
        self._failed: AssertionError | None = None
        self.generation = 0

    def ask(self, do: str, *values: Any, named: dict[str, Any] | None = None) -> Any:
        """Ask for one thing; the answer, or the exception that it raised."""
        with self._lock:
            words = [pack(each, self._give) for each in values]
            more = {key: pack(each, self._give) for key, each in (named or {}).items()}
            deadline = time.monotonic() + CALL_S
            self._send({"do": do, "with": words, "named": more})
            while True:
                message = self._receive(deadline)
                sys.stdout.write(str(message.get("out", "")))
                if "call" in message:
                    started = time.monotonic()
                    self._called(message)
                    deadline += time.monotonic() - started
                elif self._failed is not None:
                    failed, self._failed = self._failed, None
                    raise failed
                elif "ok" in message:
                    return self._taken(message["ok"])
                else:
                    error = self._exception(message)
                    if isinstance(error, StopIteration | StopAsyncIteration) and (do, *values[:1]) != _STEP:
                        raise JudgedFailed("code under test raised what ends a loop of the test's that it is called in")
                    raise error

    def stop(self, why: str) -> JudgedFailed:
        """End the worker; what to raise."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin and self._process.stdout
            self._process.stdout.close()
            with suppress(OSError):
                self._process.stdin.close()
        self._process, self._buffer = None, b""
        self._callbacks.clear()
        self._failed = None
        self._proxies.clear()
        self.generation += 1
        return JudgedFailed(why)

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=self._cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        try:
            assert self._process.stdin
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self.stop("code under test ended its process") from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._process and self._process.stdout
        file = self._process.stdout.fileno()
        ready = select.poll()
        ready.register(file, select.POLLIN)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.poll(left * 1000):
                raise self.stop(f"code under test took more than {CALL_S:g} s")
            data = os.read(file, 1 << 16)
            self._buffer += data
            if not data:
                raise self.stop("code under test ended its process")
            if len(self._buffer) > LINE:
                raise self.stop(f"code under test answered with more than {LINE >> 20} MB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise self.stop("code under test answered with nonsense") from None
        return message

    def _give(self, value: Any) -> Any:
        """What a test hands over that is no data: an object from over there, or a function to be called back."""
        if isinstance(value, JudgedError):
            value = value.judged
        number = getattr(type(value), "judged_number", None)
        if number is not None:
            return {"h": number(value)}
        if isinstance(value, type) and (owner := vars(value).get("judged")) is not None:
            return {"h": type(owner).judged_number(owner)}
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        raise NotCarried(f"a {type(value).__name__} of the test cannot be handed to code under test")

    def _taken(self, data: Any) -> Any:
        try:
            return unpack(data, self._object)
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            raise self.stop("code under test answered with nonsense") from None

    def _object(self, told: dict[str, Any]) -> Any:
        if "error" in told:
            return self._class(told["error"])
        if told.get("coroutine"):
            return self._awaited(int(told["h"]))
        number = int(told["h"])
        if number not in self._proxies:
            self._proxies[number] = self._make(number, str(told.get("name", ""))[:80], bool(told.get("low")))
        return self._proxies[number]

    async def _awaited(self, number: int) -> Any:
        return self.ask("await", self._make(number, "coroutine", False))

    def _class(self, ancestry: list[list[Any]]) -> type[Exception]:
        """The exception class of ours that stands for one over there."""
        *own, (_, name, _) = ancestry
        found = getattr(builtins, str(name), None)
        if not (isinstance(found, type) and issubclass(found, Exception)):
            raise JudgedFailed(f"code under test raised {name}")
        if not own and issubclass(AssertionError, found):
            # A test that catches what they call their error must not catch an assertion of its own.
            return self._classes.setdefault(("", found), type(found.__name__, (JudgedError, found), {}))
        for number, called, place in reversed(own):
            # By its place, so that one of an earlier worker is the same.
            key = (str(place), found)
            if key not in self._classes:
                bases = (found,) if issubclass(found, JudgedError) else (JudgedError, found)
                self._classes[key] = type(str(called)[:80], bases, {})
            found = self._classes[key]
            type.__setattr__(found, "judged", self._make(int(number), "type", False))
        return found

    def _exception(self, message: dict[str, Any]) -> BaseException:
        try:
            told = message["raised"]
            kind = self._class(told["error"])
            error = kind(*[unpack(each, str) for each in told["args"]])
            if isinstance(error, JudgedError):
                error.said, error.judged = str(told["said"]), self._object(told["as"])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return self.stop("code under test answered with nonsense")
        return error

    def _called(self, message: dict[str, Any]) -> None:
        """Code under test calls a function of the test's."""
        try:
            function = self._callbacks[int(message["call"])]
            words = [self._taken(each) for each in message["with"]]
            more = {str(key): self._taken(each) for key, each in message["named"].items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise self.stop("code under test answered with nonsense") from None
        try:
            answer = {"ok": pack(function(*words, **more), self._give)}
        except Exception as error:  # noqa: BLE001 - it goes back to where the call came from
            if isinstance(error, AssertionError):
                self._failed = error  # code under test may keep it for itself
            name = next(each.__name__ for each in type(error).__mro__ if hasattr(builtins, each.__name__))
            answer = {"raised": name, "args": [str(error)]}
        except BaseException:
            self.stop("")
            raise
        self._send(answer)
