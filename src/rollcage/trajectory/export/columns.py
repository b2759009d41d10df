"""The columns of each format, declared once: JSON lines hold values as they are, parquet by an explicit schema.

What is `json` is a string in parquet: Arrow would unify the arguments of all tools into one struct, and hand each call
back with the arguments of every other.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from rollcage.types import JsonObject

if TYPE_CHECKING:
    import pyarrow

Format = Literal["sequences", "turns", "messages", "sft", "atif"]
Kind = Literal["ids", "mask", "floats", "numbers", "texts", "text", "int", "float", "bool", "json"]

_OF_ROLLOUT: dict[str, Kind] = {
    "rollout_id": "text",
    "group_id": "text",
    "task_id": "text",
    "reward": "float",
    "trust": "text",
    "blame": "text",
    "outcome": "text",
}
_TOKENS: dict[str, Kind] = {"input_ids": "ids", "loss_mask": "mask", "logprobs": "floats"}
COLUMNS: dict[Format, dict[str, Kind]] = {
    "sequences": {
        **_TOKENS,
        **_OF_ROLLOUT,
        "index": "int",
        "session": "text",
        "parent_session": "text",
        "purpose": "text",
        "turns": "numbers",
        "prompt_length": "int",
        "truncated": "bool",
        "policy_versions": "texts",
        "breaks": "json",
        "forked_from": "text",
        "shared_prefix": "int",
    },
    "turns": {
        **_OF_ROLLOUT,
        "turn": "int",
        "purpose": "text",
        "session": "text",
        "parent_session": "text",
        "replaces": "int",
        "prompt_token_ids": "ids",
        "completion_token_ids": "ids",
        "logprobs": "floats",
        "trainable": "bool",
        "untrainable_reason": "text",
        "policy_version": "text",
        "finish_reason": "text",
        "error": "text",
        "sampling": "json",
        "request": "json",
        "message": "json",
        "usage": "json",
    },
    "messages": {**_OF_ROLLOUT, "session": "text", "purpose": "text", "messages": "json", "tools": "json"},
    "sft": {"input_ids": "ids", "assistant_masks": "mask", "labels": "ids", **_OF_ROLLOUT},
    "atif": {**_OF_ROLLOUT, "trajectory": "json"},
}


def as_columns(format: Format, row: JsonObject) -> JsonObject:
    """A row as parquet holds it."""
    kinds = COLUMNS[format]
    return {name: json.dumps(row[name]) if kind == "json" else row[name] for name, kind in kinds.items()}


def as_row(format: Format, row: JsonObject) -> JsonObject:
    """A row of parquet as it was."""
    kinds = COLUMNS[format]
    return {name: json.loads(row[name]) if kind == "json" else row[name] for name, kind in kinds.items()}


def schema(format: Format) -> pyarrow.Schema:
    """What a parquet file of this format holds."""
    import pyarrow as pa

    types: dict[Kind, Any] = {
        "ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.int8()),
        "floats": pa.list_(pa.float32()),
        "numbers": pa.list_(pa.int32()),
        "texts": pa.list_(pa.string()),
        "text": pa.string(),
        "int": pa.int32(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "json": pa.string(),
    }
    fields = [(name, types[kind]) for name, kind in COLUMNS[format].items()]
    return pa.schema(fields, metadata={"rollcage_format": format})
