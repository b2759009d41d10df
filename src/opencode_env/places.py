"""Where a session's agent works: a box of ours, or one of somebody else's backend. Both are opened and closed here."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from opencode_env._loop import loop
from opencode_env.config import OpenCodeConfig
from opencode_env.sandbox.base import SandboxBackend, SandboxHandle
from opencode_env.sandbox.boxes import BoxBackend, BoxHandle
from opencode_env.sandbox.foreign import ForeignBox, ForeignProvider, real_home
from opencode_env.task import OpenCodeTask
from rollcage.errors import SandboxError
from rollcage.run import Failure, Log, Parts, set_up
from rollcage.sandboxes.base import Sandbox
from rollcage.types import Job


class Place(Protocol):
    """A box that is open, with the agent in it."""

    @property
    def box(self) -> Sandbox:
        """As rollcage knows it."""

    @property
    def parts(self) -> Parts:
        """What the agent is run with."""

    def set_up(self, job: Job, log: Log) -> None:
        """The task's files and its setup commands; RuntimeError where one of them fails."""

    async def settle(self) -> str:
        """See that nothing of the agent runs any more. Says what went wrong, if anything did."""

    def close(self) -> None:
        """Close the box, with everything in it."""


class OwnPlace:
    """A box of ours."""

    def __init__(self, handle: BoxHandle, parts: Parts) -> None:
        self._handle, self.parts = handle, parts

    @property
    def box(self) -> Sandbox:
        """As rollcage knows it."""
        return self._handle.box

    def set_up(self, job: Job, log: Log) -> None:
        """The task's files and its setup commands."""
        try:
            loop().call(set_up, job, self.box, log)
        except Failure as failure:
            raise RuntimeError(failure.ended.error) from failure

    async def settle(self) -> str:
        """Nothing to do: a box of ours ends what a command started by itself."""
        return ""

    def close(self) -> None:
        """Close the box, with everything in it."""
        self._handle.kill()


class ForeignPlace:
    """A box of another backend, reached through its handle."""

    def __init__(self, handle: SandboxHandle, config: OpenCodeConfig, task: OpenCodeTask) -> None:
        """Open our line into the box; the agent is brought there where it lacks it."""
        self._handle, self._config, self._task = handle, config, task
        on = loop()
        self.parts = Parts(provider=ForeignProvider(), agent=on.agent, gateway=on.gateway)
        self.box = on.call(self._opened, real_home(handle, config.sandbox_home))

    async def _opened(self, home: str) -> ForeignBox:
        box, on = ForeignBox(self._handle, home), loop()
        try:
            await box.start()
            await box.furnish(on.agent.layers(), on, on.agent.version)
        except BaseException:
            await box.close()
            raise
        return box

    def set_up(self, job: Job, log: Log) -> None:
        """The task's files and its setup commands, by the handle's own means: it may know other names for paths."""
        seconds, home = job.task.limits.setup_timeout_s, self._config.sandbox_home
        for path, text in self._task.upload_files.items():
            self._handle.write_text(path if path.startswith("/") else f"{home}/workdir/{path}", text)
        for script in job.task.setup:
            done = self._handle.exec(script, cwd=f"{home}/workdir", timeout=seconds)
            if done.exit_code:
                said = (done.stderr.strip().splitlines() or [""])[-1]
                how = f"ended with exit code {done.exit_code}"
                raise RuntimeError(f"setup_failed: setup command {script!r} {how}. {said}".strip())

    async def settle(self) -> str:
        """Kill what still carries our mark; the agent may have done away with the program that would have."""
        left = await self.box.line.sweep()
        if left:
            return f"sandbox_lost: what the agent left running could not be ended: {left}"
        return f"sandbox_lost: {self.box.line.lost}" if self.box.line.lost else ""

    def close(self) -> None:
        """End what runs in the box, and close it."""
        try:
            with suppress(SandboxError, RuntimeError):
                loop().call(self.box.close)
        finally:
            self._handle.kill()


def open_place(
    backend: SandboxBackend, config: OpenCodeConfig, task: OpenCodeTask, *, seconds: float, episode_id: str | None
) -> tuple[SandboxHandle, Place]:
    """A box for one session, and the handle that its user and its verifier get. It lives for at most `seconds`."""
    if isinstance(backend, BoxBackend):
        on = loop()
        own = backend.create(timeout_s=seconds, layers=on.agent.layers())
        return own, OwnPlace(own, Parts(provider=backend.provider(on), agent=on.agent, gateway=on.gateway))
    metadata = {"episode_id": episode_id} if episode_id else None
    handle = backend.create(timeout_s=int(seconds), metadata=metadata)
    try:
        return handle, ForeignPlace(handle, config, task)
    except BaseException:
        handle.kill()
        raise
