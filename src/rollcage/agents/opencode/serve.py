"""The `serve` driver: OpenCode's own server in the box, driven over HTTP. Live, and it can be told to stop."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote

import anyio
from anyio.abc import ByteReceiveStream

from rollcage.agents.base import AgentExit, Emit
from rollcage.agents.cli_agent import KEPT
from rollcage.agents.opencode.http import USER, AnswerTooLong, Channel, ServerGone
from rollcage.agents.opencode.listener import Listener
from rollcage.agents.opencode.neutral import complaint_in
from rollcage.errors import SandboxError
from rollcage.sandboxes.base import Process, Sandbox, Tail
from rollcage.types import HOME, JsonObject

PORT = 7001
"""Where it listens, on the loopback of its box."""
CONFIG = f"{HOME}/.rollcage/opencode.json"
"""Its configuration. Read when the first session is made and not before: a server can be started without knowing it."""
ABORT_S = 1.5
"""How long a session that is cut short may take to say its last words."""
ANSWER_S = 120
"""How long the server may take for anything but thinking."""
SLOW = f"the agent's server did not answer within {ANSWER_S} s"
LOOK_S = 5
"""How long after an error the session may take to say that it is over, before it is asked."""
MAX_MESSAGES = 8 << 20
"""How much of a session is compared with what was heard of it, at its end."""
_LISTENING = b"listening on"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


class Server:
    """An `opencode serve` that runs in a box."""

    def __init__(self, box: Sandbox, password: str) -> None:
        self.box, self._password = box, password
        self.printed = Tail(KEPT)
        self._listening, self._unwanted, self._over = anyio.Event(), anyio.Event(), anyio.Event()
        self.code: int | None = None
        """Its exit code, once it has one."""

    @classmethod
    @asynccontextmanager
    async def start(cls, box: Sandbox, binary: str, env: Mapping[str, str]) -> AsyncIterator[Server]:
        """A server for as long as the block lasts; it listens when the block begins, or is dead already (`code`)."""
        server = cls(box, secrets.token_urlsafe(24))
        own = {
            "OPENCODE_CONFIG": CONFIG,
            "OPENCODE_SERVER_USERNAME": USER,
            "OPENCODE_SERVER_PASSWORD": server._password,
        }
        argv = [binary, "serve", "--hostname", "127.0.0.1", "--port", str(PORT)]
        try:
            async with box.spawn(argv, env={**env, **own}) as process, anyio.create_task_group() as tasks:
                await process.stdin.aclose()
                tasks.start_soon(server._watch, process)
                await server._listening.wait()
                yield server
                tasks.cancel_scope.cancel()
        finally:
            # Only now is it dead, with all it started.
            server._unwanted.set()
            server._over.set()

    @property
    def complaint(self) -> str:
        """Why it is dead, in its own words."""
        return complaint_in(self.printed.output)

    @property
    def alive(self) -> bool:
        """Whether it can be asked anything."""
        return self.code is None and not self._unwanted.is_set()

    def channel(self) -> AbstractAsyncContextManager[Channel]:
        """A connection to it."""
        return Channel.open(self.box, PORT, self._password)

    async def used_up(self) -> None:
        """Wait until it is no longer wanted, or dead."""
        await self._unwanted.wait()

    async def stop(self) -> None:
        """Ask whoever keeps it to end it, and wait until it is dead."""
        self._unwanted.set()
        await self._over.wait()

    async def _watch(self, process: Process) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.printed.drain, process.stderr)
                await self._hear(process.stdout)
            self.code = await process.wait()
        finally:
            self.code = 1 if self.code is None else self.code
            self._unwanted.set()
            self._listening.set()

    async def _hear(self, stream: ByteReceiveStream) -> None:
        heard = b""
        async for chunk in stream:
            heard = heard[-len(_LISTENING) :] + chunk
            if _LISTENING in heard:
                self._listening.set()


class ServeSession:
    """One session on a server: the prompt goes in, what happens goes into the log."""

    def __init__(self, server: Server, workdir: str, emit: Emit, *, limit: int) -> None:
        """`limit`: bytes that may go into the log."""
        self._server, self._emit, self._limit = server, emit, limit
        self._query = f"?directory={quote(workdir, safe='/')}"
        self._session = ""
        self._gone: str | None = None

    async def solve(self, config: JsonObject, prompt: JsonObject) -> AgentExit:
        """Work on the prompt until the session has nothing more to do. Cancelled, it stops generation first."""
        await self._server.box.write(CONFIG, json.dumps(config).encode(), mode=0o600)
        listener: Listener | None = None
        try:
            async with self._server.channel() as stream, self._server.channel() as control:
                async with aclosing(stream.events(f"/event{self._query}")) as events:
                    with anyio.fail_after(ANSWER_S):
                        await anext(events, None)
                        made = await control.ask("POST", f"/session{self._query}", {"title": "rollout"})
                        self._session = _name(made.json(), "id")
                    listener = Listener(self._session, self._emit, self._limit)
                    await self._converse(listener, events, control, prompt)
                if self._gone is None:
                    with anyio.fail_after(ANSWER_S):
                        await self._settle(listener, control)
        except anyio.get_cancelled_exc_class():
            if listener is not None:
                await self._abort(listener)
            raise
        except ServerGone as error:
            self._gone = str(error)
        except TimeoutError:
            self._gone = SLOW
        failed = self._gone or (listener.error if listener else None)
        return AgentExit(code=0 if failed is None else self._server.code or 1, error=failed)

    async def _converse(
        self, listener: Listener, events: AsyncIterator[JsonObject], control: Channel, prompt: JsonObject
    ) -> None:
        await listener.begin()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow, listener, events, control)
            tasks.start_soon(listener.tell)
            try:
                await self._finish(listener, control, prompt)
            except ServerGone as error:
                self._gone = str(error)
            except TimeoutError:
                self._gone = SLOW
            tasks.cancel_scope.cancel()

    async def _finish(self, listener: Listener, control: Channel, prompt: JsonObject) -> None:
        with anyio.fail_after(ANSWER_S):
            (await control.ask("POST", self._path("prompt_async"), prompt)).json()
        while not listener.idle.is_set():
            with anyio.move_on_after(LOOK_S):
                await listener.idle.wait()
            if (
                (listener.error or listener.stream_limit_reached)
                and not listener.idle.is_set()
                and not await self._busy(control)
            ):
                return

    async def _follow(self, listener: Listener, events: AsyncIterator[JsonObject], control: Channel) -> None:
        try:
            async for event in events:
                await listener.hear(event)
                if event.get("type") == "permission.asked":
                    # Nobody is there to be asked; `opencode run` says no as well.
                    request = _name(event.get("properties"), "id")
                    await control.ask("POST", f"/permission/{request}/reply{self._query}", {"reply": "reject"})
            raise ServerGone("the agent's server ended its stream of events")
        except ServerGone as error:
            self._gone = self._server.complaint or str(error)
            listener.idle.set()

    async def _busy(self, control: Channel) -> bool:
        with anyio.fail_after(ANSWER_S):
            states = (await control.ask("GET", f"/session/status{self._query}")).json()
        return isinstance(states, dict) and self._session in states

    async def _abort(self, listener: Listener) -> None:
        # A connection of its own: on the other one a request may be half way.
        with anyio.move_on_after(ABORT_S, shield=True), suppress(ServerGone, SandboxError):
            async with self._server.channel() as control:
                await control.ask("POST", self._path("abort"))
                await self._settle(listener, control)

    async def _settle(self, listener: Listener, control: Channel) -> None:
        try:
            messages = await control.ask("GET", self._path("message"), limit=MAX_MESSAGES)
        except AnswerTooLong:
            # It is in the log as far as it was heard; nobody's work is worth less for it.
            await listener.note(f"the session's messages come to more than {MAX_MESSAGES >> 20} MB; they were not read")
            return
        await listener.settle(messages.json())

    def _path(self, what: str) -> str:
        return f"/session/{self._session}/{what}{self._query}"


def _name(value: Any, key: str) -> str:
    """An id that is fit to be put into a path."""
    name = value.get(key) if isinstance(value, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ServerGone(f"the agent's server gave no usable {key}")
    return name
