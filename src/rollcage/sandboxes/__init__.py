"""Boxes: the protocol every backend speaks, and what can be done with any box."""

from rollcage.sandboxes.base import Exit, Output, Process, Provider, Rewindable, Sandbox, sh

__all__ = ["Exit", "Output", "Process", "Provider", "Rewindable", "Sandbox", "sh"]
