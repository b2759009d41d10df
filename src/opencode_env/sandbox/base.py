"""What the published environment takes a sandbox for: three sync protocols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class ExecResult:
    """How a command ended."""

    exit_code: int
    """124 where its time ran out, 128+n where signal n killed it."""
    stdout: str
    """The end of what it printed."""
    stderr: str
    """The end of what it complained about."""


@runtime_checkable
class BgJob(Protocol):
    """A command that runs in the background."""

    @property
    def pid(self) -> int:
        """A number that names it."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; TimeoutError where it does not end in time."""

    def kill(self) -> None:
        """End it, with everything it started."""


@runtime_checkable
class SandboxHandle(Protocol):
    """A box that is open."""

    @property
    def sandbox_id(self) -> str:
        """Its name."""

    def exec(
        self, cmd: str, *, envs: dict[str, str] | None = None, cwd: str | None = None, timeout: float | None = 60
    ) -> ExecResult:
        """Run shell text to its end."""

    def start_bg(self, cmd: str, *, envs: dict[str, str] | None = None, cwd: str | None = None) -> BgJob:
        """Start shell text in the background."""

    def write_text(self, path: str, content: str) -> None:
        """Make or replace a file, with the folders above it."""

    def read_text(self, path: str) -> str:
        """What a file says."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of that name."""

    def kill(self) -> None:
        """Close the box, with everything in it."""


@runtime_checkable
class SandboxBackend(Protocol):
    """Opens boxes."""

    def create(
        self, *, timeout_s: int = 900, envs: dict[str, str] | None = None, metadata: dict[str, str] | None = None
    ) -> SandboxHandle:
        """A box that lives for at most `timeout_s`."""
