"""The pure parts of the MCP plane: formats, names, the rule for shared names, and server-sent events cut anywhere."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support.steady  # noqa: F401
from rollcage.environments.fleet import ToolConflict, convert_tool_format
from rollcage.mcp.convert import Union, offered_name
from rollcage.mcp.jsonrpc import Malformed, message_of
from rollcage.sse import EventReader

SCHEMA: dict[str, Any] = {
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "properties": {
        "where": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}], "default": None},
        "words": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1},
    },
    "required": ["words"],
    "additionalProperties": False,
    "type": "object",
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object", "properties": {}}, **more}


def test_the_openai_format_keeps_the_whole_schema() -> None:
    raw = {"name": "draw", "description": "Draws.", "inputSchema": SCHEMA, "annotations": {"readOnlyHint": True}}
    converted = convert_tool_format(raw)
    assert converted == {
        "type": "function",
        "function": {"name": "draw", "description": "Draws.", "parameters": SCHEMA},
    }
    converted["function"]["parameters"]["properties"].clear()
    assert SCHEMA["properties"]


def test_a_tool_object_of_the_mcp_package_converts_alike() -> None:
    from mcp.types import Tool

    assert convert_tool_format(Tool(name="draw", inputSchema=SCHEMA)) == {
        "type": "function",
        "function": {"name": "draw", "parameters": SCHEMA},
    }
    assert convert_tool_format({"name": "draw", "input_schema": SCHEMA})["function"]["parameters"] == SCHEMA


@pytest.mark.parametrize("schema", [None, {}, [], "x"])
def test_a_tool_without_a_schema_takes_nothing(schema: object) -> None:
    parameters = convert_tool_format({"name": "draw", "inputSchema": schema})["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {}}


@given(st.text(min_size=1, max_size=200), st.sampled_from(["", "api/v1/mcp"]))
def test_every_name_becomes_one_that_openai_takes(name: str, endpoint: str) -> None:
    offered = offered_name(name, endpoint)
    assert 0 < len(offered) <= 64
    assert all(character.isascii() and (character.isalnum() or character in "_-") for character in offered)


def test_long_names_stay_apart() -> None:
    assert offered_name("a" * 80) != offered_name("a" * 81)


def test_a_tool_can_be_called_by_its_own_name_too() -> None:
    union = Union("first")
    union.add("mcp", [tool("files.read/all")])
    assert list(union.tools) == ["files_read_all"]
    found = union.find("files.read/all")
    assert found
    assert found.original == "files.read/all"


def test_names_of_the_http_plane_are_never_offered() -> None:
    union = Union("first")
    union.add("mcp", [tool("reset"), tool("step"), tool("state"), tool("close"), tool("closer")])
    assert list(union.tools) == ["closer"]
    assert union.withheld == ["mcp: reset", "mcp: step", "mcp: state", "mcp: close"]


def test_the_order_of_endpoints_decides_who_keeps_a_shared_name() -> None:
    union = Union("prefix")
    for endpoint in ("b", "a", "c"):
        union.add(endpoint, [tool("draw", description=endpoint)])
    assert {name: one.endpoint for name, one in union.tools.items()} == {"draw": "b", "a__draw": "a", "c__draw": "c"}
    (conflict,) = union.conflicts
    assert (conflict.winner, conflict.others) == ("b", {"a": "a__draw", "c": "c__draw"})
    strict = Union("error")
    strict.add("b", [tool("draw")])
    with pytest.raises(ToolConflict, match="both 'b' and 'a'"):
        strict.add("a", [tool("draw")])


@given(st.lists(st.integers(0, 200), max_size=8), st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_are_read_however_they_are_cut(cuts: list[int], newline: str) -> None:
    lines = [
        "id: 1",
        "data: ",
        "",
        ": a comment",
        "event: message",
        "id: 2",
        'data: {"a":',
        'data: "é\U0001f600"}',
        "",
        "retry: 250",
        "data:x",
        "",
        "",
    ]
    raw = newline.join(lines).encode()
    reader = EventReader()
    points = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    chunks = [raw[start:end] for start, end in pairwise(points)]
    events = [event for chunk in [*chunks, b"\n"] for event in reader.feed(chunk)]
    assert [(event.data.decode(), event.id, event.retry_s) for event in events] == [
        ("", "1", None),
        ('{"a":\n"é\U0001f600"}', "2", None),
        ("x", "2", 0.25),
    ]


@pytest.mark.parametrize("text", ["", "[]", "nonsense", b"\xff", "1"])
def test_what_is_no_message_is_refused(text: str | bytes) -> None:
    with pytest.raises(Malformed):
        message_of(text)


def test_a_message_is_an_object() -> None:
    assert message_of(json.dumps({"id": 1})) == {"id": 1}
