"""What the server refuses, beyond what rollouts themselves can get wrong."""

from __future__ import annotations

from rollcage.errors import QueueFull, RollcageError

__all__ = ["QueueFull", "Stopping", "Unauthorized"]


class Stopping(RollcageError):
    """The server is about to end and starts nothing more."""


class Unauthorized(RollcageError):
    """No key, or not one of ours."""
