"""Asks a real engine directly, past the gateway: what it says itself is what captured turns are held against."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

import anyio.to_thread

from rollcage.types import Endpoint, Turn

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "maxLength": 24}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}


class Said(NamedTuple):
    """An engine's answer."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


async def ask(endpoint: Endpoint, path: str, body: Any = None) -> Said:
    """One question to the engine itself; `path` is below `/v1` only if it says so."""
    return await anyio.to_thread.run_sync(_ask, endpoint, path, body)


def _ask(endpoint: Endpoint, path: str, body: Any) -> Said:
    url = endpoint.base_url.removesuffix("/v1") + path
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {endpoint.key.get_secret_value()}"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=300) as answer:
            return Said(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Said(error.code, error.read().decode())


def ids(turn: Turn) -> list[int | None]:
    return [token.id for token in turn.tokens]


def logprobs(turn: Turn) -> list[float | None]:
    return [token.logprob for token in turn.tokens]
