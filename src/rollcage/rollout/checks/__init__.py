"""Checks: test frameworks that run the agent's code, and the complete report of expected tests that decides."""

from rollcage.rollout.checks.run import Checked, Sides, run_checks

__all__ = ["Checked", "Sides", "run_checks"]
