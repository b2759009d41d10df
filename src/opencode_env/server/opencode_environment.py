"""The environment's class by its published place. Sessions of it are made by the server, which owns the rollouts."""

from rollcage.server.environment import OpenCodeEnvironment

__all__ = ["OpenCodeEnvironment"]
