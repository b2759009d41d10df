"""The conformance suite: what every backend must hold, as checks over the public protocol. No test runner is needed.

    async for verdict in check(provider):
        print(verdict.outcome, verdict.name, verdict.detail)

A backend that fails one of them is not a backend. `rollcage sandbox check local` runs it from the command line.
"""

from rollcage.conformance.sandboxes.suite import CHECKS, check, chosen, judge
from rollcage.conformance.sandboxes.values import (
    BoxSubject,
    CheckVerdict,
    ConformanceCheck,
    Failed,
    NotApplicable,
    Traits,
)

__all__ = [
    "CHECKS",
    "BoxSubject",
    "CheckVerdict",
    "ConformanceCheck",
    "Failed",
    "NotApplicable",
    "Traits",
    "check",
    "chosen",
    "judge",
]
