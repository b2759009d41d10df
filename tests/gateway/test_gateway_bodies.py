"""What agents may send: large, but not so intricate that reading it would fill memory."""

from __future__ import annotations

import json

import pytest

from rollcage.gateway.bodies import MOST_PARTS, read


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
