"""The conformance suite: what every backend must hold, as checks over the public protocol. No test runner is needed.

    async for verdict in check(provider):
        print(verdict.outcome, verdict.name, verdict.detail)

A backend that fails one of them is not a backend. `rollcage sandbox check local` runs it from the command line.
"""

from rollcage.sandboxes.conformance.suite import CHECKS, check, chosen, judge
from rollcage.sandboxes.conformance.values import CheckVerdict, ConformanceCheck, Failed, NotApplicable, Subject, Traits

__all__ = [
    "CHECKS",
    "CheckVerdict",
    "ConformanceCheck",
    "Failed",
    "NotApplicable",
    "Subject",
    "Traits",
    "check",
    "chosen",
    "judge",
]
