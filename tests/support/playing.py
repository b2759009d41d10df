"""The type of the fixture that runs one task to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollcage.results.fold import Rollout

Play = Callable[..., Awaitable[Rollout]]
"""`await play(task, agent="shell")`."""
