"""One event loop in a thread of its own, for sync callers: it holds the gateway, and is stopped with the process."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal

if TYPE_CHECKING:
    from rollcage.agents.opencode.agent import OpenCode
    from rollcage.gateway import Gateway
    from rollcage.server.service import Service
    from rollcage.settings import Settings

T = TypeVar("T")

log = logging.getLogger("opencode_env")

_lock = threading.Lock()
_loops: dict[int, LoopThread] = {}


class LoopThread:
    """What all sessions of a process share."""

    portal: BlockingPortal
    """Runs async functions on the loop, for callers of any other thread."""
    stack: AsyncExitStack
    """Ends what was opened on the loop, at the end of the process."""
    gateway: Gateway
    """Records what models say."""
    agent: OpenCode
    """The agent."""
    settings: Settings
    """Where things are kept."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._service: Service | None = None
        self._thread = threading.Thread(target=self._run, name="rollcage", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        # What finalizers end at the end of the process must outlive us: who registers last is first.
        weakref.finalize(self, _nothing)
        atexit.register(self.close)

    def close(self) -> None:
        """End everything that still runs."""
        with suppress(RuntimeError):
            self.portal.start_task_soon(self.portal.stop, True)
        self._thread.join(30)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function on the loop, and wait for what it returns."""
        return self.portal.call(function, *args)

    @property
    def here(self) -> bool:
        """Whether the caller runs on the loop itself."""
        return threading.current_thread() is self._thread

    async def service(self) -> Service:
        """The rollout service of this process, opened when it is first asked for. Call it on the loop."""
        async with self._opening:
            if self._service is None:
                self._service = await self._tasks.start(self._hold_service)
            return self._service

    async def _hold_service(self, *, task_status: TaskStatus[Service]) -> None:
        from rollcage.server.service import Service

        opened = False
        try:
            async with Service.open(self.settings) as service:
                opened = True
                task_status.started(service)
                await anyio.sleep_forever()
        except Exception:
            # Who asked for it is told; sessions of the harness go on without it.
            if not opened:
                raise
            self._service = None
            log.exception("the rollout service broke; the next call opens it anew")

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend_options={"use_uvloop": True})
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for the start
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        from rollcage.agents.cli_agent import Downloads
        from rollcage.agents.opencode.agent import OpenCode
        from rollcage.gateway import Gateway
        from rollcage.settings import Settings

        self.settings = Settings.from_environ()
        self.agent = OpenCode(Downloads(self.settings.cache_dir, self.settings.npm_registry))
        async with AsyncExitStack() as self.stack:
            self.gateway = await self.stack.enter_async_context(Gateway.open())
            async with anyio.create_task_group() as self._tasks:
                self._opening = anyio.Lock()
                async with BlockingPortal() as self.portal:
                    self._started.set()
                    await self.portal.sleep_until_stopped()
                self._tasks.cancel_scope.cancel()


def _nothing() -> None:
    """Ends nothing."""


def loop() -> LoopThread:
    """The loop of this process, started when it is first asked for."""
    with _lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = LoopThread()
        return _loops[os.getpid()]
