"""What agents may send: large, but not so intricate that reading it would fill memory."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from rollcage.gateway.bodies import HELD, MOST_PARTS, TOOL_LISTS, SharedParts, read
from rollcage.types import JsonObject


async def test_a_large_conversation_is_read_whole() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 1000} for _ in range(5000)], "stream": True}
    found = await read(json.dumps(body).encode())
    assert found is not None
    assert found.value == body


@pytest.mark.parametrize(
    "text", ["word " * 300_000, 'é😀 "\\/\t\x01' * 90_000, "QUJD" * 300_000, "\\" * 300_000 + "x", "0af" * 200_000]
)
@pytest.mark.parametrize("escaped", [True, False])
async def test_a_long_text_is_read_in_slices_wherever_they_end(text: str, escaped: bool) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}], "n": 1}
    found = await read(json.dumps(body, ensure_ascii=escaped).encode())
    assert found is not None and found.value == body
    assert list(found.raw) == ["messages"]


async def test_a_body_of_a_million_tiny_parts_is_not_read_at_all() -> None:
    body = b'{"messages":[],"x":[' + b'{"a":[]},' * (MOST_PARTS // 3) + b"0]}"
    assert await read(body) is None


def test_what_requests_have_in_common_is_held_once() -> None:
    def request(text: str) -> JsonObject:
        tools = [{"type": "function", "function": {"name": "bash", "description": text}}]
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "".join(["sh", "ort"])}]
        return {"messages": messages, "tools": tools, "stream": True}

    shared = SharedParts()
    first, second, other = request("x" * 5000), request("x" * 5000), request("x" * 4000 + "y" * 1000)
    for body in (first, second, other):
        asked = copy.deepcopy(body)
        shared.share(body)
        assert body == asked
    assert second["messages"][0]["content"] is first["messages"][0]["content"] and second["tools"] is first["tools"]
    assert other["messages"][0]["content"] is not first["messages"][0]["content"]
    odds: list[dict[str, Any]] = [
        {},
        {"messages": "x" * 600, "tools": {}},
        {"messages": [None, {"content": ["x"]}], "tools": []},
    ]
    for odd in odds:
        shared.share(copied := copy.deepcopy(odd))
        assert copied == odd


def test_what_is_held_to_be_shared_is_bounded() -> None:
    shared = SharedParts()
    for number in range(100):
        shared.share({"messages": [{"content": f"{number:06}" * 10_000}], "tools": [{"name": str(number)}]})
    assert sum(map(len, shared._texts.values())) <= HELD and len(shared._tools) <= TOOL_LISTS
