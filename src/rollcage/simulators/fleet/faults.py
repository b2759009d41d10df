"""The switches of the local Fleet: everything that can go wrong with a remote environment, on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio

ENDPOINTS = ("mcp", "api/v1/mcp")
"""The MCP endpoints of an instance."""


@dataclass
class Faults:
    """What goes wrong from now on. Every field may be changed at any time."""

    boot_s: float = 0.0
    """How long an instance takes to boot."""
    boot_fails: bool = False
    """Instances end as `error` instead of running."""
    quota: int | None = None
    """How many instances may run at once."""
    provisioning: list[tuple[int, Any]] = field(default_factory=list)
    """Status and detail of the next answers to a creation; after them creations succeed."""
    missing: set[str] = field(default_factory=set)
    """MCP endpoints that answer 404."""
    refusing: set[str] = field(default_factory=set)
    """MCP endpoints that answer 401 to everybody."""
    drop_answers: int = 0
    """So many tool calls are carried out, and then the connection is dropped instead of an answer."""
    duplicate_tools: bool = False
    """The second endpoint has the tools of the first one too (for instances that boot from now on)."""
    resumable: bool = False
    """Endpoints number their events, so that a dropped answer can be read on (for instances from now on)."""
    hanging: set[str] = field(default_factory=set)
    """Tools that never answer."""
    held: set[str] = field(default_factory=set)
    """Tools that do not answer before they are let go (`release`)."""
    slow_tools: dict[str, float] = field(default_factory=dict)
    """Tools that take so many seconds."""
    reset_refused: dict[str, str] = field(default_factory=dict)
    """Environments that refuse to reset, and what they say."""
    reset_broken: dict[str, int] = field(default_factory=dict)
    """Environments whose reset ends with this HTTP status."""
    offers_step: bool = False
    """Managers offer step and state, which Fleet's own do not."""
    state: dict[str, Any] = field(default_factory=dict)
    """What a manager tells as its state, beside or instead of the usual."""
    dripping: set[str] = field(default_factory=set)
    """Paths of instances that answer with a space every tenth of a second, without end."""
    verifiers: frozenset[str] | None = None
    """Only these verifiers are run, by their source; none: whatever is sent, as this user."""
    _news: anyio.Event = field(default_factory=anyio.Event)

    def moved(self) -> None:
        """Something happened that a test may wait for."""
        news, self._news = self._news, anyio.Event()
        news.set()

    def release(self) -> None:
        """Let the tools that were held go on."""
        self.held.clear()
        self.moved()

    async def wait(self) -> None:
        """Wait until something happens at some desk."""
        await self._news.wait()
