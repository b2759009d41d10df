"""What can go wrong with a remote environment. Each error says which part failed and what to do.

FleetError
├── KeyRefused            no key, or one the service does not take
├── UnknownEnvironment    no environment of that name (a UsageError too)
├── QuotaReached          no further instance is allowed
├── BootFailed            the instance did not come up
│   └── BootTooSlow       not within the time allowed
├── InstanceLost          the instance is gone
├── ResetRefused          the environment did not reset
├── NotOffered            this instance has no such operation (step, state)
├── VerifierFailed        the verifier did not run to its end; this is no reward of 0
└── ToolError             something about tools; names the endpoint
    ├── ToolNotFound      no endpoint that answers has a tool of that name (a UsageError too)
    ├── ToolConflict      two endpoints have a tool of that name, and on_conflict is "error" (a UsageError too)
    ├── EndpointDown      the endpoint does not answer, or refuses us
    ├── ToolTimeout       the call's time ran out
    └── ToolFailed        the tool ran (or its arguments were looked at) and failed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcage.errors import RollcageError, UsageError

if TYPE_CHECKING:
    from rollcage.fleet.types import ToolResult


class FleetError(RollcageError):
    """A remote environment cannot be used as asked."""


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


class InstanceLost(FleetError):
    """The instance is gone: stopped, expired or out of reach."""


class ResetRefused(FleetError):
    """The environment did not reset; names its key."""


class NotOffered(FleetError):
    """This instance has no such operation."""


class VerifierFailed(FleetError):
    """The verifier did not run to its end. That is no reward of 0: there is no reward."""


class ToolError(FleetError):
    """Something about tools went wrong."""

    def __init__(self, message: str, *, endpoint: str = "", may_have_run: bool = False) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        """The name of the endpoint, empty where no single one is to blame."""
        self.may_have_run = may_have_run
        """Whether the tool may have acted all the same: calling again could act twice."""


class ToolNotFound(ToolError, UsageError):
    """No endpoint that answers has a tool of that name."""


class ToolConflict(ToolError, UsageError):
    """Two endpoints have a tool of the same name, and that was not to be."""


class EndpointDown(ToolError):
    """The endpoint does not answer, or refuses us."""


class ToolTimeout(ToolError):
    """The call's time ran out."""


class ToolFailed(ToolError):
    """The tool answered with an error."""

    def __init__(self, message: str, *, endpoint: str, result: ToolResult) -> None:
        super().__init__(message, endpoint=endpoint, may_have_run=True)
        self.result = result
        """The whole answer."""
