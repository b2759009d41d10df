"""HTTP towards services that nobody vouches for: answers are bounded and not unpacked, and our keys do not come back.

Whoever answers may echo what it was sent. The credentials of a request are taken out of its own answer before anybody
reads it, so that they reach neither an error message nor the log nor an agent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx

LARGEST = 64 * 1024 * 1024
"""Bytes of one answer; screenshots are large, but nobody shall fill our memory."""
SHORTEST = 8
"""Shorter keys ("none", "x") are no secrets, and would be found everywhere."""
HIDDEN = b"[key]"

_LOCAL = ("all://127.0.0.1", "all://localhost", "all://[::1]")


class AnswerTooLarge(httpx.DecodingError):
    """The answer has more bytes than are read."""


def client(*, secret_headers: Sequence[str] = ("authorization",), **options: Any) -> httpx.AsyncClient:
    """A client like any other; redirects are not followed, and this machine is reached without a proxy.

    `secret_headers`: those of a request whose values must not come back.
    """

    async def guard(response: httpx.Response) -> None:
        _guard(response, tuple(_secrets(response.request, secret_headers)))

    hooks = {"response": [guard]}
    direct = dict.fromkeys(_LOCAL)
    # An unpacked answer can be a million times as large as what was sent; so nobody is asked to pack one.
    headers = {"accept-encoding": "identity"}
    return httpx.AsyncClient(event_hooks=hooks, mounts=direct, headers=headers, **options)


def _guard(response: httpx.Response, secrets: tuple[bytes, ...]) -> None:
    """Called with the head of every answer, before its body is read."""
    packed = response.headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        raise httpx.DecodingError(f"the answer is packed ({packed[:40]}), which was not asked for")
    if isinstance(response.stream, httpx.AsyncByteStream):
        response.stream = _GuardedBody(response.stream, secrets)


def _secrets(request: httpx.Request, headers: Sequence[str]) -> Iterator[bytes]:
    for name in headers:
        secret = request.headers.get(name, "").removeprefix("Bearer ").encode()
        if len(secret) >= SHORTEST:
            yield secret


class _GuardedBody(httpx.AsyncByteStream):
    """The body: so much of it and no more, without the secrets."""

    def __init__(self, stream: httpx.AsyncByteStream, secrets: tuple[bytes, ...]) -> None:
        self._stream, self._secrets = stream, secrets

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, rest = 0, b""
        async for chunk in self._stream:
            size += len(chunk)
            if size > LARGEST:
                raise AnswerTooLarge(f"the answer is larger than {LARGEST >> 20} MiB")
            whole, rest = self._split(rest + chunk)
            if whole:
                yield whole
        if rest:
            yield rest

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _split(self, data: bytes) -> tuple[bytes, bytes]:
        """What may be read now, and an end that could be the beginning of a secret."""
        for secret in self._secrets:
            data = data.replace(secret, HIDDEN)
        held = max((_beginning(data, secret) for secret in self._secrets), default=0)
        return data[: len(data) - held], data[len(data) - held :]


def _beginning(data: bytes, secret: bytes) -> int:
    """How many of the last bytes are the first ones of the secret."""
    longest = min(len(data), len(secret) - 1)
    return next((count for count in range(longest, 0, -1) if data.endswith(secret[:count])), 0)
