"""The columns of each format, declared once: JSON lines hold values as they are, parquet by an explicit schema.

What is `json` is a string in parquet: Arrow would unify the arguments of all tools into one struct, and hand each call
back with the arguments of every other.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
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


_CODES: dict[Kind, str] = {"ids": "i", "mask": "b", "floats": "f"}
"""How `array` names the types of the columns that hold tokens."""


def table(format: Format, rows: list[JsonObject]) -> pyarrow.Table:
    """Rows as parquet holds them. Tokens go through flat arrays: value by value they would take most of the time."""
    import pyarrow as pa

    whole = schema(format)
    columns = []
    for field, kind in zip(whole, COLUMNS[format].values(), strict=True):
        values = [row[field.name] for row in rows]
        flat = _flat(values, _CODES[kind]) if kind in _CODES else None
        if flat is None:
            columns.append(pa.array(values, field.type))
            continue
        tokens, offsets = flat
        inner = pa.Array.from_buffers(field.type.value_type, len(tokens), [None, pa.py_buffer(tokens)])
        columns.append(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner, type=field.type))
    return pa.Table.from_arrays(columns, schema=whole)


def _flat(lists: list[Iterable[Any]], code: str) -> tuple[array[Any], array[int]] | None:
    """The lists one after the other, and where each begins; None where one has a gap."""
    values, offsets = array(code), array("i", [0])
    try:
        for each in lists:
            values.extend(each)
            offsets.append(len(values))
    except TypeError:
        return None
    return values, offsets


def encoding(format: Format) -> dict[str, Any]:
    """How parquet packs the columns: ids and floats byte by byte, which compress better and quicker so; the rest by
    dictionary.
    """
    kinds = COLUMNS[format]
    split = [f"{name}.list.element" for name, kind in kinds.items() if kind in ("ids", "floats")]
    others = [f"{name}.list.element" if kind in ("mask", "numbers", "texts") else name
              for name, kind in kinds.items() if kind not in ("ids", "floats")]  # fmt: skip
    return {
        "compression": "zstd",
        "compression_level": 9,
        "use_dictionary": others,
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT") or None,
    }


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
