"""What the server refuses, beyond what rollouts themselves can get wrong."""

from __future__ import annotations

from rollcage.errors import QueueFull, RollcageError, UsageError

__all__ = ["NoSuchEnvironment", "NotAllowed", "QueueFull", "Stopping", "Unauthorized"]


class Stopping(RollcageError):
    """The server is about to end and starts nothing more."""


class Unauthorized(RollcageError):
    """No key, or not one of ours."""


class NotAllowed(UsageError):
    """What the caller's key does not allow."""


class NoSuchEnvironment(UsageError):
    """A remote environment that this server does not offer."""
