"""The agent conformance suite: what every agent must hold, tried with a scripted model. No test runner is needed.

    async for verdict in check(agent, provider):
        print(verdict.outcome, verdict.name, verdict.detail)

`rollcage agent check codex` runs it from the command line.
"""

from rollcage.conformance.agents.checks import CHECKS
from rollcage.conformance.agents.suite import check, chosen, opened_subject

__all__ = ["CHECKS", "check", "chosen", "opened_subject"]
