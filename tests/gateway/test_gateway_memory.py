"""Ten thousand calls, and what they leave behind."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from rollcage.gateway import Gateway
from rollcage.types import Limits, Turn
from support.hand_made import Rig, chat, hand_made, listener, says


def resident_kb() -> int:
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


@pytest.mark.slow
async def test_ten_thousand_calls_leave_memory_flat() -> None:
    turns = 0

    async def record(_: Turn) -> None:
        nonlocal turns
        turns += 1

    async with hand_made(says(*("word " for _ in range(30)))) as model, Gateway.open() as gateway:
        sock = listener()
        port = sock.getsockname()[1]
        async with gateway.lend(
            model.endpoint(), sock, limits=Limits(), mode="transparent_proxy", record=record
        ) as lease:
            gate = Rig(gateway, lease, [], port)
            before = 0
            async with gate.connect() as client:
                for n in range(10_000):
                    if n == 1000:
                        before = resident_kb()
                    # Every kind of call: streamed, sifted, whole, translated, and those that break.
                    body, path = chat(stream=n % 3 != 0), "/v1/chat/completions"
                    if n % 5 == 0:
                        body, path = (
                            {"max_tokens": 9, "messages": chat()["messages"], "stream": n % 2 == 0},
                            "/v1/messages",
                        )
                    elif n % 7 == 0:
                        body.pop("stream_options", None)
                    reply = await client.ask(gate.request(body, path=path, extra=f"x-session-id: {n}\r\n"))
                    assert reply.status == 200
                    model.asked.clear()
            grown = resident_kb() - before
        assert turns == 10_000
        assert grown < 4096, f"{grown} KB more after 9,000 further calls"
