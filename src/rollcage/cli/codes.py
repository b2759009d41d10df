"""The exit codes of the command, and what they mean."""

from __future__ import annotations

SUCCEEDED = 0
"""The rollout succeeded; the command did what it was asked to."""
OTHER = 1
"""The rollout ended in another outcome."""
USAGE = 2
"""Bad input: an option, a task file, an id nobody knows."""
NOT_READY = 3
"""This machine, its log or the endpoint is not ready."""
INTERNAL = 70
"""A fault of rollcage's own."""
INTERRUPTED = 130
"""Ctrl-C."""
PIPE_CLOSED = 141
"""Whoever read the output went away."""

HELP = """\b
Exit codes:
  0    the rollout succeeded, the command did what it was asked to
  1    the rollout ended in another outcome (rollcage show ID says which)
  2    bad input: an option, a task file, an id nobody knows
  3    this machine or the endpoint is not ready (rollcage doctor says why)
  130  interrupted
"""
