"""What every value is made of: the base model, JSON, names, and the paths of a box."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    StringConstraints,
)

HOME = "/home/user"
"""The agent's home directory in every box, whatever the backend: equal paths make equal prompts."""

TESTS_DIR = f"{HOME}/tests"
"""Where a task's tests are staged, after the agent is gone."""

LOGS_DIR = f"{HOME}/logs"
"""Where the verifier leaves its reward."""

PROGRAMS = f"{HOME}/.rollcage"
"""Where the agent's own program and settings are; no file of a task goes there."""

JsonObject = dict[str, Any]
"""A JSON object whose shape belongs to somebody else (an engine, an agent)."""


class Value(BaseModel):
    """Base of all values: frozen, strict about unknown keys, documented by the docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Identifier = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f]*$")]

METADATA_LIMIT = 64 << 10
"""Bytes of JSON that a caller may attach to a rollout."""


def _bounded(value: JsonObject) -> JsonObject:
    try:
        written = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {str(error) or type(error).__name__}") from None
    if len(written) > METADATA_LIMIT:
        raise ValueError(f"is {len(written)} bytes of JSON; at most {METADATA_LIMIT} are kept")
    return value


Metadata = Annotated[JsonObject, AfterValidator(_bounded)]
"""A JSON object of the caller's own, small enough to be stored with every rollout."""
