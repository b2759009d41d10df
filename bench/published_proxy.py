"""The published design of a capturing proxy, as a baseline: FastAPI, httpx, and `json` for every chunk.

    python bench/published_proxy.py PORT UPSTREAM_PORT RECORD_FILE

It is the design at its best: connections are kept and not limited, nothing is logged, and the record is one line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def proxy(upstream: str, record: str) -> FastAPI:
    """The app between an agent and the model at `upstream`."""
    app = FastAPI()
    client = httpx.AsyncClient(base_url=upstream, timeout=None, limits=httpx.Limits(max_connections=None))

    async def relayed(body: dict[str, Any]) -> AsyncIterator[str]:
        text: list[str] = []
        tokens: list[dict[str, Any]] = []
        finish = None
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line != "data: [DONE]":
                    for choice in json.loads(line[6:]).get("choices", []):
                        text.append(choice["delta"].get("content") or "")
                        tokens += (choice.get("logprobs") or {}).get("content") or []
                        finish = choice.get("finish_reason") or finish
                yield line + "\n\n"
        logprobs = [token["logprob"] for token in tokens]
        turn = {"request": body, "text": "".join(text), "tokens": tokens, "logprobs": logprobs, "finish": finish}
        with open(record, "a") as file:
            file.write(json.dumps(turn) + "\n")

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> StreamingResponse:
        body = {**await request.json(), "logprobs": True, "top_logprobs": 5}
        return StreamingResponse(relayed(body), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    port, upstream_port, record_file = sys.argv[1:]
    app = proxy(f"http://127.0.0.1:{upstream_port}", record_file)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False, backlog=2048)
