"""Fakes that ship: what tests, demos and machines without a model use in place of the real thing."""

from rollcage.testing.script import RecordedRequest
from rollcage.testing.scripted import ScriptedModel
from rollcage.testing.tokenizer import Tokenizer, default_tokenizer
from rollcage.types import ScriptedCall, ScriptedTurn

__all__ = ["RecordedRequest", "ScriptedCall", "ScriptedModel", "ScriptedTurn", "Tokenizer", "default_tokenizer"]
