"""A bare HTTP client for tests of the scripted model: sees every byte, chunk and broken connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rollcage.types import Endpoint, JsonObject

HELLO: JsonObject = {"model": "scripted", "messages": [{"role": "user", "content": "Say hi."}]}
BASH: JsonObject = {
    "type": "function",
    "function": {"name": "bash", "description": "Run a command", "parameters": {"type": "object"}},
}
EVERYTHING: JsonObject = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
}


@dataclass
class Answer:
    """One HTTP answer, as far as it came."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool

    @property
    def json(self) -> JsonObject:
        value: JsonObject = json.loads(self.body)
        return value

    @property
    def events(self) -> list[str]:
        return [event for event in self.body.decode().split("\n\n") if event]

    @property
    def chunks(self) -> list[JsonObject]:
        lines = [line for event in self.events for line in event.split("\n") if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    @property
    def choices(self) -> list[JsonObject]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices", ())]

    @property
    def deltas(self) -> list[JsonObject]:
        return [choice["delta"] for choice in self.choices]

    def text(self, member: str = "content") -> str:
        return "".join(delta.get(member) or "" for delta in self.deltas)

    def arguments(self, call: int = 0) -> str:
        items = [item for delta in self.deltas for item in delta.get("tool_calls") or () if item["index"] == call]
        return "".join(item["function"].get("arguments") or "" for item in items)

    def names(self) -> list[str]:
        items = [item for delta in self.deltas for item in delta.get("tool_calls") or ()]
        return [item["function"]["name"] for item in items if "name" in item["function"]]

    @property
    def ids(self) -> list[int]:
        return [id for choice in self.choices for id in choice.get("token_ids") or ()]

    @property
    def entries(self) -> list[JsonObject]:
        return [entry for choice in self.choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]

    @property
    def finish(self) -> str | None:
        return next((choice["finish_reason"] for choice in self.choices if choice["finish_reason"]), None)

    @property
    def usage(self) -> JsonObject:
        usage: JsonObject = self.chunks[-1]["usage"]
        return usage


async def request(method: str, url: str, *, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
    """Send one request and read until the server is done or breaks off."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {address.path} HTTP/1.1", "host: test", "connection: close", f"content-length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        raw = await reader.read()
    finally:
        writer.close()
    return _parsed(raw)


async def ask(endpoint: Endpoint, body: JsonObject, *, path: str = "/chat/completions", **headers: str) -> Answer:
    """Ask a completion of an endpoint."""
    sent = {"authorization": f"Bearer {endpoint.key.get_secret_value()}", "content-type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    return await request("POST", endpoint.base_url + path, body=body, headers=sent)


async def content(endpoint: Endpoint, body: JsonObject) -> str:
    """What a whole answer says."""
    text: str = (await ask(endpoint, body)).json["choices"][0]["message"]["content"]
    return text


def conversation(answers: int) -> JsonObject:
    """A request that holds this many answers already."""
    said = [{"role": "assistant", "content": "..."}, {"role": "user", "content": "go on"}] * answers
    return {**HELLO, "messages": [*HELLO["messages"], *said]}


def _parsed(raw: bytes) -> Answer:
    head, _, rest = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    if not first:
        return Answer(0, {}, b"", whole=False)
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    status = int(first.split(" ")[1])
    if headers.get("transfer-encoding") != "chunked":
        return Answer(status, headers, rest, whole=len(rest) == int(headers.get("content-length", "0")))
    body = b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return Answer(status, headers, body, whole=True)
        body, rest = body + rest[:length], rest[length + 2 :]
    return Answer(status, headers, body, whole=False)
