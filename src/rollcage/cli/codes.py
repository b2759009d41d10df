"""The exit codes of the command, and what they mean."""

from __future__ import annotations

OK = 0
"""The command did its work; a rollout was scored, or there was nothing to verify."""
BROKEN = 1
"""The rollout has no reward because something broke; or a check failed."""
USAGE = 2
"""Bad input: an option, a task file, an unknown id."""
NOT_READY = 3
"""This machine, its log or the endpoint is not ready."""
BELOW = 4
"""The reward is below `--require`, or there is none to compare."""
INTERNAL = 70
"""A fault of rollcage's own."""
INTERRUPTED = 130
"""Ctrl-C."""
PIPE_CLOSED = 141
"""Whoever read the output went away."""

EVAL_HELP = """\b
Exit codes:
  0    every rollout was scored (whatever its reward)
  1    some were not: they broke, cannot be run here, or a limit was reached
  2    bad input: an option, a source, a changed task
  3    a model, this machine or its log is not ready
  4    everything was scored, and a model's mean is below --require
  130  interrupted; the same command goes on
"""

HELP = """\b
Exit codes:
  0    done; the rollout was scored (whatever its reward), or there was nothing to verify
  1    the rollout has no reward because something broke (rollcage show ID says what)
  2    bad input: an option, a task file, an unknown id
  3    this machine or the endpoint is not ready (rollcage doctor says why)
  4    the reward is below --require
  130  interrupted
"""
