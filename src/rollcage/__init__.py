"""rollcage runs real coding agents in cages and brings back training-grade rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcage.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    # Fetched when it is asked for: it needs the extra `client`, and most commands do not.
    if name == "Client":
        from rollcage.client import Client

        return Client
    raise AttributeError(f"module 'rollcage' has no attribute {name!r}")
