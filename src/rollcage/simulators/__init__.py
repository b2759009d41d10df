"""Simulators that ship: a model that answers from a script, and a local Fleet. Users run them, tests too."""

from typing import TYPE_CHECKING, Any

from rollcage.simulators.scripted.model import ScriptedModel
from rollcage.simulators.scripted.script import RecordedRequest
from rollcage.simulators.scripted.tokenizer import Tokenizer, default_tokenizer
from rollcage.types import ScriptedCall, ScriptedTurn

if TYPE_CHECKING:
    from rollcage.simulators.fleet import FleetRuntime

__all__ = [
    "FleetRuntime",
    "RecordedRequest",
    "ScriptedCall",
    "ScriptedModel",
    "ScriptedTurn",
    "Tokenizer",
    "default_tokenizer",
]


def __getattr__(name: str) -> Any:
    """The local Fleet needs an extra, so it is fetched only when it is asked for."""
    if name == "FleetRuntime":
        from rollcage.simulators.fleet import FleetRuntime

        return FleetRuntime
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
