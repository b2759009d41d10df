"""The gateway: every model call of every rollout goes through it, and is recorded token by token."""

from rollcage.gateway.app import Gateway
from rollcage.gateway.lease import Lease
from rollcage.gateway.live import Delta

__all__ = ["Delta", "Gateway", "Lease"]
