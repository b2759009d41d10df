"""What OpenCode prints to stderr: its log, and a complaint where it cannot start or go on."""

from __future__ import annotations

from anyio.abc import ByteReceiveStream

from rollcage.sandboxes.base import Tail

_LOGGED = "timestamp="
_KEPT = 8000


class Printed:
    """The end of it, read while it comes."""

    def __init__(self) -> None:
        self._tail = Tail(_KEPT)

    async def drain(self, stream: ByteReceiveStream) -> None:
        """Read it to its end."""
        await self._tail.drain(stream)

    @property
    def text(self) -> str:
        """The end of what came so far."""
        return self._tail.output.text

    @property
    def complaint(self) -> str | None:
        """The last line that is not of the log."""
        output = self._tail.output
        whole = output.text.splitlines()[1 if output.truncated else 0 :]
        lines = [line for line in whole if line.strip() and not line.startswith(_LOGGED)]
        return lines[-1].strip() if lines else None
