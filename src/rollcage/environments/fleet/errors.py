"""What can go wrong with a Fleet and its instances. Each error says which part failed and what to do.

EnvironmentFailed
└── FleetError
    ├── KeyRefused            no key, or one the service does not take
    ├── UnknownEnvironment    no environment of that name (a UsageError too)
    ├── QuotaReached          no further instance is allowed
    ├── BootFailed            the instance did not come up
    │   └── BootTooSlow       not within the time allowed
    ├── InstanceLost          the instance is gone (an EnvironmentLost too)
    ├── ResetRefused          the environment did not reset (a ResetFailed too)
    ├── NotOffered            this instance has no such operation (step, state)
    └── VerifierFailed        the verifier did not run to its end (a ScoringError too); this is no reward of 0

The errors of its tools (`ToolError` and what is below it) are those of `rollcage.mcp`.
"""

from __future__ import annotations

from rollcage.errors import EnvironmentFailed, EnvironmentLost, ResetFailed, ScoringError, UsageError


class FleetError(EnvironmentFailed):
    """A Fleet, or an instance of it, cannot be used as asked."""


class KeyRefused(FleetError):
    """No key, or one that the service does not take."""


class UnknownEnvironment(FleetError, UsageError):
    """No environment of that name, or none this key may use."""


class QuotaReached(FleetError):
    """The service allows no further instance now."""


class BootFailed(FleetError):
    """The instance did not come up."""


class BootTooSlow(BootFailed):
    """The instance did not come up within the time allowed."""


class InstanceLost(FleetError, EnvironmentLost):
    """The instance is gone: stopped, expired or out of reach."""


class ResetRefused(FleetError, ResetFailed):
    """The environment did not reset; names its key."""


class NotOffered(FleetError):
    """This instance has no such operation."""


class VerifierFailed(FleetError, ScoringError):
    """The verifier did not run to its end. That is no reward of 0: there is no reward."""
