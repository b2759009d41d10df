"""What agents may send: large, but not so intricate that reading it would fill memory."""

from __future__ import annotations

import json

from rollcage.gateway.bodies import MOST_PARTS, read


async def test_a_large_conversation_is_read_whole() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 1000} for _ in range(5000)], "stream": True}
    found = await read(json.dumps(body).encode())
    assert found is not None
    assert found.value == body


async def test_a_body_of_a_million_tiny_parts_is_not_read_at_all() -> None:
    body = b'{"messages":[],"x":[' + b'{"a":[]},' * (MOST_PARTS // 3) + b"0]}"
    assert await read(body) is None
