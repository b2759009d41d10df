"""Our boxes by the published names: sync adapters over providers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskStatus
from pydantic import SecretStr

from opencode_env._loop import LoopThread, loop
from opencode_env.sandbox.base import ExecResult
from rollcage.errors import UsageError
from rollcage.sandboxes.base import SHELL, Provider, Sandbox, Tail, run, sh
from rollcage.sandboxes.layers import Layer
from rollcage.settings import Settings
from rollcage.types import HOME, SandboxSpec

T = TypeVar("T")

FOREVER_S = 365 * 24 * 3600.0
_numbers = itertools.count(1)


class BoxJob:
    """A command that runs in the background of a box."""

    def __init__(self, ended: Future[int]) -> None:
        self._ended = ended
        self.pid = next(_numbers)
        """A number of our own: processes of a box have no numbers outside it."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; TimeoutError where it does not end in time."""
        try:
            return self._ended.result(timeout)
        except CancelledError:
            return 137
        except FutureTimeout:
            raise TimeoutError(f"the command had not ended after {timeout:g} s") from None

    def kill(self) -> None:
        """End it, with everything it started."""
        self._ended.cancel()


class BoxHandle:
    """One of our boxes, for sync callers."""

    def __init__(
        self,
        on: LoopThread,
        provider: Provider,
        box: Sandbox,
        hold: tuple[anyio.Event, Future[None]],
        envs: dict[str, str],
    ) -> None:
        """Made by a backend. `hold`: how to let go of the box, and what tells that it is closed."""
        self._loop, self.provider, self.box, self._hold, self._envs = on, provider, box, hold, envs
        self._jobs: list[BoxJob] = []

    @property
    def sandbox_id(self) -> str:
        """Its name."""
        return self.box.id

    @property
    def raw(self) -> Sandbox:
        """The box itself, as rollcage knows it."""
        return self.box

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function over the box itself, such as those of `rollcage.sandboxes`."""
        return self._loop.call(function, self.box, *args)

    def exec(
        self, cmd: str, *, envs: dict[str, str] | None = None, cwd: str | None = None, timeout: float | None = 60
    ) -> ExecResult:
        """Run shell text to its end; exit code 124 where its time ran out."""

        async def execute() -> ExecResult:
            env, seconds = {**self._envs, **(envs or {})}, FOREVER_S if timeout is None else timeout
            done = await sh(self.box, cmd, env=env, cwd=cwd or HOME, timeout_s=seconds, limit=16 << 20)
            return ExecResult(done.code, done.stdout.text, done.stderr.text)

        return self._loop.call(execute)

    def start_bg(self, cmd: str, *, envs: dict[str, str] | None = None, cwd: str | None = None) -> BoxJob:
        """Start shell text in the background. What it prints is thrown away: send it to a file."""

        async def execute(*, task_status: TaskStatus[None]) -> int:
            env = {**self._envs, **(envs or {})}
            async with self.box.spawn([*SHELL, cmd], env=env, cwd=cwd or HOME) as process:
                await process.stdin.aclose()
                task_status.started()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(Tail(1).drain, process.stderr)
                    await Tail(1).drain(process.stdout)
                return await process.wait()

        ended, _ = self._loop.portal.start_task(execute)
        self._jobs.append(BoxJob(ended))
        return self._jobs[-1]

    def write_text(self, path: str, content: str) -> None:
        """Make or replace a file, with the folders above it."""
        self._loop.call(self.box.write, path, content.encode())

    def read_text(self, path: str) -> str:
        """What a file says; FileMissing where there is none."""
        return self._loop.call(self.box.read, path).decode("utf-8", "replace")

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of that name."""

        async def look() -> bool:
            return (await run(self.box, ["test", "-e", path])).code == 0

        return self._loop.call(look)

    def kill(self) -> None:
        """Close the box, with everything in it; returns when it is gone."""
        for job in self._jobs:
            job.kill()
        release, closed = self._hold
        with suppress(RuntimeError):
            self._loop.portal.call(release.set)
        with suppress(CancelledError):
            closed.result()


class BoxBackend:
    """Any provider of ours, by the published protocol."""

    def __init__(
        self, provider: Callable[[LoopThread], AbstractAsyncContextManager[Provider]], spec: SandboxSpec
    ) -> None:
        """`provider` is made when the first box is opened, on the loop that all sessions share."""
        self._make, self._spec = provider, spec
        self._providers: dict[int, Provider] = {}

    def __getstate__(self) -> dict[str, Any]:
        """It can be sent to another process, as trainers do; what it has opened stays here."""
        return {**self.__dict__, "_providers": {}}

    @property
    def spec(self) -> SandboxSpec:
        """What its boxes are like."""
        return self._spec

    def create(
        self,
        *,
        timeout_s: float = 900,
        envs: dict[str, str] | None = None,
        metadata: dict[str, str] | None = None,
        layers: Sequence[Layer] = (),
    ) -> BoxHandle:
        """A box that lives for at most `timeout_s`; its home starts as `layers`. `metadata` is not looked at."""
        on = loop()
        provider, spec = self.provider(on), self.spec

        async def hold(*, task_status: TaskStatus[tuple[Sandbox, anyio.Event]]) -> None:
            release = anyio.Event()
            async with provider.open(spec, layers) as box:
                task_status.started((box, release))
                with anyio.move_on_after(timeout_s):
                    await release.wait()

        closed, (box, release) = on.portal.start_task(hold)
        return BoxHandle(on, provider, box, (release, closed), envs or {})

    def provider(self, on: LoopThread) -> Provider:
        """The provider behind it."""

        async def begin() -> Provider:
            return await on.stack.enter_async_context(self._make(on))

        # By process: one that was forked has a loop of its own.
        if os.getpid() not in self._providers:
            self._providers[os.getpid()] = on.call(begin)
        return self._providers[os.getpid()]


class LocalSandboxBackend(BoxBackend):
    """Boxes on this machine: no account, no network."""

    def __init__(self, *, spec: SandboxSpec | None = None, state_dir: Path | None = None) -> None:
        """`state_dir`: where layers are kept; the usual folder where it is not given."""
        super().__init__(partial(_local, state_dir), spec or SandboxSpec())

    @property
    def spec(self) -> SandboxSpec:
        """What its boxes are like; where nobody named their system, it is the usual one of rollouts."""
        from rollcage.sandboxes.local.provider import LocalProvider
        from rollcage.wiring import system_of

        on = loop()
        provider = self.provider(on)
        if self._spec.system or self._spec.template or not isinstance(provider, LocalProvider):
            return self._spec
        return self._spec.model_copy(update={"system": system_of(on.settings, provider.images)})


class E2BSandboxBackend(BoxBackend):
    """Boxes in E2B's cloud."""

    def __init__(
        self, *, api_key: str | None = None, template: str | None = None, sandbox_kwargs: dict[str, Any] | None = None
    ) -> None:
        """The key is taken from `E2B_API_KEY` where it is not given.

        `sandbox_kwargs`: fields of a SandboxSpec; what only E2B's own SDK knows cannot be passed on.
        """
        key = api_key or Settings.from_environ().e2b.api_key.get_secret_value()
        if not key:
            raise RuntimeError("api_key: E2B needs one; give api_key or set E2B_API_KEY")
        spec = SandboxSpec.model_validate({**(sandbox_kwargs or {}), "backend": "e2b", "template": template or ""})
        super().__init__(partial(_e2b, SecretStr(key)), spec)


def backend_of(given: Any) -> BoxBackend:
    """What a factory was given, as a backend of ours; UsageError that says what can be given."""
    if isinstance(given, BoxBackend):
        return given
    if all(hasattr(given, name) for name in ("name", "check", "open")):
        return BoxBackend(partial(_given, given), SandboxSpec(backend=given.name))
    raise UsageError(
        f"{type(given).__name__} is no backend of ours",
        argument="sandbox_backend",
        remedy="give LocalSandboxBackend(), E2BSandboxBackend(), or a rollcage provider",
    )


def _given(provider: Provider, on: LoopThread) -> AbstractAsyncContextManager[Provider]:
    return nullcontext(provider)


def _local(state_dir: Path | None, on: LoopThread) -> AbstractAsyncContextManager[Provider]:
    from rollcage.sandboxes.local.provider import LocalProvider

    return LocalProvider(state_dir or on.settings.home)


def _e2b(key: SecretStr, on: LoopThread) -> AbstractAsyncContextManager[Provider]:
    from rollcage.sandboxes.e2b.provider import E2BProvider

    return E2BProvider(on.settings.e2b.model_copy(update={"api_key": key}), on.settings.home)


__all__ = ["BoxBackend", "BoxHandle", "BoxJob", "E2BSandboxBackend", "LocalSandboxBackend", "backend_of"]
