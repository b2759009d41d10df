"""The virtual machines of the small E2B: local boxes that live as long as they are paid for, and what runs in them."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import anyio
from anyio.abc import ByteReceiveStream

from rollcage.errors import SandboxError
from rollcage.sandboxes.base import Process, Sandbox
from rollcage.sandboxes.local.process import LocalProcess
from rollcage.types import HOME, JsonObject
from support.e2b_runtime.rooted import RootedProcess

Event = tuple[str, bytes | int]
"""`stdout` and `stderr` with bytes, `end` with an exit code."""
_QUEUE = 16


class Order(NamedTuple):
    """What a client ordered."""

    template: str
    metadata: dict[str, str]
    seconds: int
    internet: bool


class Command:
    """A command that runs whether or not anybody listens to it, as envd's do."""

    def __init__(self, pid: int, argv: list[str]) -> None:
        self.pid, self.argv = pid, argv
        self.stdin: anyio.abc.ByteSendStream | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue(_QUEUE)
        self._process: Process | None = None
        self.started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Empty, or why it could not be."""
        self.gone = asyncio.Event()
        """Its machine went away."""

    async def run(self, box: Sandbox, env: Mapping[str, str], cwd: str) -> None:
        """Run it to its end."""
        try:
            async with box.spawn(self.argv, env=env, cwd=cwd) as process:
                self._process, self.stdin = process, process.stdin
                self.started.set_result("")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._pass_on, "stdout", process.stdout)
                    tasks.start_soon(self._pass_on, "stderr", process.stderr)
                code = await process.wait()
            # envd has no number for a command that was killed.
            await self._events.put(("end", -1 if code == 137 else code))
        except SandboxError as error:
            if not self.started.done():
                self.started.set_result(str(error))
            self.gone.set()
        finally:
            if not self.started.done():
                self.started.set_result("the machine is gone")

    def kill(self) -> None:
        """SIGKILL."""
        if isinstance(self._process, LocalProcess | RootedProcess):
            self._process.kill()

    async def events(self) -> AsyncIterator[Event]:
        """What it prints and how it ends; stops early where its machine goes away."""
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            while True:
                event = asyncio.ensure_future(self._events.get())
                await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    return
                yield event.result()
                if event.result()[0] == "end":
                    return
        finally:
            gone.cancel()

    async def _pass_on(self, name: str, stream: ByteReceiveStream) -> None:
        with suppress(anyio.ClosedResourceError):
            async for chunk in stream:
                await self._events.put((name, chunk))


class Machine:
    """One sandbox of the small E2B."""

    def __init__(self, order: Order, box: Sandbox, stack: AsyncExitStack) -> None:
        self.id = f"i{secrets.token_hex(10)}"
        self.token = secrets.token_hex(16)
        self.order, self.box = order, box
        self._stack = stack
        self._pids = itertools.count(300)
        self._commands: dict[int, Command] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.began = datetime.now(UTC)
        self.ends = self.began
        self.renewals = -1
        """How often its life was prolonged."""
        self.renew(order.seconds)

    def renew(self, seconds: int) -> None:
        """It ends so many seconds from now."""
        self.ends = datetime.now(UTC) + timedelta(seconds=seconds)
        self.renewals += 1

    def command(self, pid: int) -> Command | None:
        """The command with this number, if it still runs."""
        return self._commands.get(pid)

    async def start(self, argv: list[str], env: Mapping[str, str], cwd: str) -> Command:
        """Run a command, with the variables that E2B adds to every one."""
        command = Command(next(self._pids), argv)
        own = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self.id, "E2B_TEMPLATE_ID": self.order.template}
        task = asyncio.create_task(command.run(self.box, {**own, **env}, cwd or HOME))
        self._commands[command.pid] = command
        self._tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._commands.pop(command.pid, None)
            if not done.cancelled():
                done.exception()

        task.add_done_callback(over)
        return command

    async def close(self) -> None:
        """End it and all in it."""
        for command in self._commands.values():
            command.gone.set()
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def told(self) -> JsonObject:
        """As the API lists it."""
        return {
            "templateID": self.order.template,
            "sandboxID": self.id,
            "clientID": "local",
            "startedAt": self.began.isoformat(),
            "endAt": self.ends.isoformat(),
            "cpuCount": 2,
            "memoryMB": 1024,
            "diskSizeMB": 1024,
            "state": "running",
            "envdVersion": ENVD_VERSION,
            "metadata": self.order.metadata,
        }


ENVD_VERSION = "0.6.7"
"""Decides what the SDK thinks the machine can do."""
