"""Fakes that ship: what tests, demos and machines without a model use in place of the real thing."""

from typing import TYPE_CHECKING, Any

from rollcage.testing.script import RecordedRequest
from rollcage.testing.scripted import ScriptedModel
from rollcage.testing.tokenizer import Tokenizer, default_tokenizer
from rollcage.types import ScriptedCall, ScriptedTurn

if TYPE_CHECKING:
    from rollcage.testing.e2b_runtime import E2BRuntime
    from rollcage.testing.fleet_runtime import FleetRuntime

__all__ = [
    "E2BRuntime",
    "FleetRuntime",
    "RecordedRequest",
    "ScriptedCall",
    "ScriptedModel",
    "ScriptedTurn",
    "Tokenizer",
    "default_tokenizer",
]


def __getattr__(name: str) -> Any:
    """The local Fleet and the small E2B need their extras, so each is fetched only when it is asked for."""
    if name == "E2BRuntime":
        from rollcage.testing.e2b_runtime import E2BRuntime

        return E2BRuntime
    if name == "FleetRuntime":
        from rollcage.testing.fleet_runtime import FleetRuntime

        return FleetRuntime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
