"""Live commands in a box that offers `exec`, `start_bg` and `write_text` and nothing else.

A small program (`inside.py`) runs in the box. It is asked by `exec`: one call at a time waits for what its commands
say, another hands over what they are to be told. What comes out of the box is taken for hostile.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import ByteSendStream

from opencode_env.sandbox import inside
from opencode_env.sandbox.base import BgJob, ExecResult, SandboxHandle
from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.e2b_process import Output
from rollcage.types import JsonObject

T = TypeVar("T")

_PROGRAM = Path(inside.__file__).read_text()
_WAIT_S = 10.0
"""How long one `exec` waits for something to happen."""
_EXEC_S = 60.0
_IDLE_S = 180
"""The program ends by itself, with all its commands, when it was not asked for so long."""
_ATTEMPTS = 4
_MOST_INLINE = 60_000
"""What fits into the text of a command; more goes through a file."""
_PIECE = 1 << 16
_BATCH = 1 << 18
_DEATH_S = 60.0
_STALLED_S = 0.2
_KILLED = 137


class Input(ByteSendStream):
    """What a command reads."""

    def __init__(self, process: LineProcess) -> None:
        self._process, self._closed = process, False

    async def send(self, item: bytes) -> None:
        """Hand over all of it."""
        await anyio.lowlevel.checkpoint()
        if self._closed:
            raise anyio.ClosedResourceError
        for at in range(0, len(item), _PIECE):
            if self._process.over:
                raise anyio.BrokenResourceError
            await self._process.tell({"in": base64.b64encode(item[at : at + _PIECE]).decode()})

    async def aclose(self) -> None:
        """End of file."""
        if not self._closed:
            self._closed = True
            if not self._process.over:
                await self._process.tell({"in": None})


class LineProcess:
    """One command."""

    def __init__(self, line: Line, number: int) -> None:
        self._line, self._number = line, number
        self.stdin, self.stdout, self.stderr = Input(self), Output(), Output()
        self._begun, self._ended = asyncio.Event(), asyncio.Event()
        self._code, self._failed, self._loss = _KILLED, "", ""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    async def tell(self, message: JsonObject) -> None:
        """Send it a message."""
        await self._line.put({"id": self._number, **message})

    async def begin(self, order: JsonObject) -> None:
        """Start it; SandboxError where it cannot be started."""
        await self.tell(order)
        await self._begun.wait()
        if self._failed:
            raise SandboxError(f"cannot run {order['argv'][0]}: {self._failed}")
        if self._loss:
            raise SandboxLost(self._loss)

    async def wait(self) -> int:
        """Its exit code (128+n where signal n killed it), once it and every process it started are dead."""
        await self._ended.wait()
        if self._loss:
            raise SandboxLost(self._loss)
        return self._code

    async def end(self) -> None:
        """Kill what still runs, and wait until it is dead."""
        self.stdout.close()
        self.stderr.close()
        if not self.over:
            with anyio.move_on_after(_DEATH_S):
                await self._line.kill(self._number)
                await self._ended.wait()
        if not self.over:
            self.lose("a command in the box cannot be killed")
            raise SandboxError("a command in the box cannot be killed: the box does not say that it has ended")

    async def hear(self, event: JsonObject) -> None:
        """What the box says of it."""
        match event:
            case {"out": str(text)}:
                await self.stdout.feed(base64.b64decode(text))
            case {"err": str(text)}:
                await self.stderr.feed(base64.b64decode(text))
            case {"started": True}:
                self._begun.set()
            case {"failed": str(why)}:
                self._failed = why[:500] or "no reason given"
                self._finish()
            case {"exit": int(code)}:
                self._code = code if 0 <= code <= 255 else _KILLED
                self._finish()
            case _:
                raise ValueError("an event that means nothing")

    def lose(self, why: str) -> None:
        """The box went away: let `wait` say so."""
        if not self.over:
            self._loss = why
            self._finish()

    def _finish(self) -> None:
        self._ended.set()
        self._begun.set()
        self.stdout.finish()
        self.stderr.finish()


class Line:
    """Our end of the program in one box."""

    def __init__(self, handle: SandboxHandle) -> None:
        self._handle = handle
        self.name = f"rollcage-{secrets.token_hex(8)}"
        self.folder = f"/tmp/{self.name}"  # noqa: S108 - in the box; a socket's path must be short
        # Threads of its own: a box that is slow holds up no other.
        self._threads = anyio.CapacityLimiter(4)
        self._processes: dict[int, LineProcess] = {}
        self._numbers = itertools.count(1)
        self._outbox: deque[JsonObject] = deque()
        self._size = self._last = 0
        self._changed = asyncio.Event()
        self._job: BgJob | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = self._swept = False
        self.lost = ""
        """Why nothing more can be done in the box; empty while it answers."""

    async def start(self) -> None:
        """Bring the program into the box, and see that it answers."""
        await self.call(self._handle.write_text, f"{self.folder}/program.py", _PROGRAM)
        command = f"exec python3 -I -S {self.folder}/program.py serve {self.folder} {_IDLE_S}"
        self._job = await self.call(self._handle.start_bg, command)
        await self._ask({"messages": []})
        self._tasks = [asyncio.create_task(self._guarded(step)) for step in (self._pull, self._push)]

    async def close(self) -> None:
        """End every command, and the program. A call that waits for it ends with it."""
        self._closing = True
        if self._tasks:
            if not self.lost:
                with suppress(SandboxError):
                    await self._ask({"quit": True})
            self._changed.set()
            await asyncio.wait(self._tasks, timeout=_DEATH_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.lose("the box is closed")
        if self._job is not None:
            with suppress(Exception):
                await self.call(self._job.kill)
            await self.sweep()

    async def spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> LineProcess:
        """Start a command; whoever does ends it."""
        number = next(self._numbers)
        process = self._processes[number] = LineProcess(self, number)
        if self.lost:
            process.lose(self.lost)
            raise SandboxLost(self.lost)
        try:
            with anyio.CancelScope(shield=True):
                await process.begin({"argv": list(argv), "env": dict(env), "cwd": cwd})
        except BaseException:
            self._processes.pop(number, None)
            raise
        return process

    async def end(self, process: LineProcess) -> None:
        """See that a command is dead, and forget it."""
        try:
            await process.end()
        finally:
            self._processes = {number: kept for number, kept in self._processes.items() if kept is not process}
            if self.lost and not self._swept:
                self._swept = True
                await self.sweep()

    async def put(self, message: JsonObject) -> None:
        """Send a message, once there is room for it on the way."""
        while self._size >= _BATCH and not self.lost:
            self._changed.clear()
            await self._changed.wait()
        if not self.lost:
            self._last += 1
            self._outbox.append({"n": self._last, **message})
            self._size += _size(message)
            self._changed.set()

    async def kill(self, number: int) -> None:
        """Have a command killed, past all that waits for commands to read."""
        try:
            await self._ask({"kill": number})
        except SandboxError as error:
            self.lose(str(error))

    async def sweep(self) -> str:
        """Kill what commands that are over left running, past the program: what runs there may have killed it.

        Says why it could not be done, if so. It goes by marks, and with a text of its own: files there are anybody's.
        """
        living = ",".join(str(number) for number, process in self._processes.items() if not process.over)
        command = f"python3 -I -S -c {quote(_PROGRAM)} sweep {self.folder} {living or '-'}"
        with anyio.move_on_after(_EXEC_S, shield=True):
            try:
                done = await self.call(self._handle.exec, command, timeout=_EXEC_S)
            except Exception as error:  # noqa: BLE001 - whatever the backend raises, it was not done
                return f"{type(error).__name__}: {error}"
            return _reason(done) if done.exit_code else ""
        return f"no end after {_EXEC_S:g} s"

    def lose(self, why: str) -> None:
        """Nothing more comes out of the box."""
        self.lost = self.lost or why
        self._changed.set()
        for process in list(self._processes.values()):
            process.lose(self.lost)

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a sync function of the handle's in a thread."""
        await anyio.lowlevel.checkpoint()
        return await anyio.to_thread.run_sync(
            partial(function, *args, **options), abandon_on_cancel=True, limiter=self._threads
        )

    async def _guarded(self, step: Callable[[], Any]) -> None:
        try:
            await step()
        except SandboxError as error:
            self.lose(str(error))
        except (ValueError, TypeError, KeyError):
            self.lose("the box says what no program of ours would say")

    async def _pull(self) -> None:
        after = 0
        while not (self._closing or self.lost):
            before, asked = after, asyncio.get_running_loop().time()
            answer = await self._ask({"after": after, "wait": _WAIT_S})
            for event in answer["events"]:
                # What is repeated because an answer was lost was heard already.
                if event["n"] == after + 1:
                    after += 1
                    process = self._processes.get(event["id"])
                    if process is not None:
                        about = {name: value for name, value in event.items() if name not in ("n", "id", "size")}
                        await process.hear(about)
            if after == before and asyncio.get_running_loop().time() - asked < _WAIT_S / 2:
                # Our program would have waited for something to happen.
                await asyncio.sleep(_STALLED_S)

    async def _push(self) -> None:
        while not self.lost:
            while not self._outbox:
                if self._closing or self.lost:
                    return
                self._changed.clear()
                await self._changed.wait()
            batch, size = [], 0
            for message in self._outbox:
                batch.append(message)
                size += _size(message)
                if size >= _BATCH:
                    break
            heard = (await self._ask({"messages": batch}))["heard"]
            if type(heard) is not int:
                raise ValueError("a count that is no number")
            if heard < self._outbox[0]["n"]:
                # A command that does not read holds it up; the box has waited already.
                await asyncio.sleep(_STALLED_S)
            while self._outbox and self._outbox[0]["n"] <= heard:
                self._size -= _size(self._outbox.popleft())
            self._changed.set()

    async def _ask(self, request: JsonObject) -> JsonObject:
        """Ask the program; SandboxLost where it does not answer. What was heard already is not done again."""
        why = ""
        for attempt in range(_ATTEMPTS):
            if attempt and self._closing:
                break
            if attempt:
                await asyncio.sleep(0.2 * 2**attempt)
            try:
                done = await self.call(self._handle.exec, await self._command(request), timeout=_EXEC_S)
            except Exception as error:  # noqa: BLE001 - whatever the backend raises, the box did not answer
                why = f"{type(error).__name__}: {error}"
                continue
            for line in done.stdout.splitlines():
                name, _, text = line.partition(" ")
                if name == self.name and (answer := _decoded(text)) is not None:
                    return answer
            why = _reason(done)
            if done.exit_code == 127:
                raise SandboxError(f"the box lacks python3, which sessions need there: {why}")
        raise SandboxLost(f"the box {self._handle.sandbox_id} does not answer: {why}")

    async def _command(self, request: JsonObject) -> str:
        word = base64.b64encode(json.dumps(request).encode()).decode()
        if len(word) > _MOST_INLINE:
            path = f"{self.folder}/request-{secrets.token_hex(4)}"
            await self.call(self._handle.write_text, path, word)
            word = f"@{path}"
        return f"python3 -I -S {self.folder}/program.py ask {self.folder} {word}"


def _reason(done: ExecResult) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.exit_code}"])[-1][:300]


def _size(message: JsonObject) -> int:
    return len(message.get("in") or "") + 200


def _decoded(text: str) -> JsonObject | None:
    try:
        answer = json.loads(base64.b64decode(text))
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None
