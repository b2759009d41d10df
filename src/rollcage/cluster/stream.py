"""News of a node on a connection of their own, while there are many: a call of Ray's takes far more of both processes.

Both ends show that they know the node's secret. Where the connection cannot be had, breaks or is slow, Ray is asked. It
is asked every second at the latest, and whenever nothing happens: it knows of ends that a connection does not tell.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import struct
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import anyio

from rollcage.cluster.messages import NodeLink, NodeNews, Welcome

RAY_S = 1.0
"""How long Ray is not asked."""
AGAIN_S = 10.0
"""How long no connection is tried after one that failed."""
PROOF = 32
"""Bytes of what either end shows."""
_QUESTION = struct.Struct("!QQ")


def proof(secret: bytes, of: str) -> bytes:
    """What only those can show who know the secret: nobody learns it from what is shown."""
    return blake2b(of.encode(), key=secret, digest_size=PROOF).digest()


async def answer_news(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    exchange: Callable[[int, int, float], Awaitable[NodeNews]],
) -> None:
    """The node's end, until the head closes its own."""
    writer.write(proof(secret, "node"))
    while True:
        heard, acknowledged = _QUESTION.unpack(await reader.readexactly(_QUESTION.size))
        data = pickle.dumps(await exchange(heard, acknowledged, RAY_S), 5)
        writer.write(len(data).to_bytes(4, "big"))
        writer.write(data)
        await writer.drain()


class NewsStream:
    """The head's end."""

    def __init__(self, address: str, welcome: Welcome, link: NodeLink, lease_s: float) -> None:
        """`link`: Ray's way to the node."""
        self._address, self._welcome, self._link, self._lease_s = address, welcome, link, lease_s
        self._offered = welcome.streams and welcome.port
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._ray_answered = self._not_before = float("-inf")

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        """As `NodeLink.exchange`."""
        now = time.monotonic()
        if self._offered and now - self._ray_answered < RAY_S and now >= self._not_before:
            news = await self._asked(heard, acknowledged)
            if news is not None:
                return news
        news = await self._link.exchange(heard, acknowledged)
        self._ray_answered = time.monotonic()
        return news

    def close(self) -> None:
        """Nothing more is asked here."""
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    async def _asked(self, heard: int, acknowledged: int) -> NodeNews | None:
        """What the node answers on the connection; None where Ray is to be asked."""
        news: NodeNews | None = None
        try:
            with anyio.fail_after(self._lease_s / 8):
                reader, writer = self._connection or await self._connected()
                writer.write(_QUESTION.pack(heard, acknowledged))
                size = int.from_bytes(await reader.readexactly(4), "big")
                news = pickle.loads(await reader.readexactly(size))  # noqa: S301 - of our own process on that node
        except (OSError, EOFError):
            self._not_before = time.monotonic() + AGAIN_S
        finally:
            if news is None:  # cancelled, too: half an answer may still be on its way
                self.close()
        return news

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._connection = reader, writer = await asyncio.open_connection(self._address, self._welcome.port)
        writer.write(proof(self._welcome.secret, "news"))
        shown = await reader.readexactly(PROOF)
        if not hmac.compare_digest(shown, proof(self._welcome.secret, "node")):
            raise ConnectionError("somebody else answers there")
        return reader, writer
