"""One connection of a relay on our side: to the caller's listener, joined by frames to one in the box."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol, cast

from rollcage.sandboxes.inside import relay as frames


class FrameSink(Protocol):
    """What takes a stream's frames to the box."""

    @property
    def full(self) -> bool:
        """Whether streams should stop reading until there is room."""

    def put(self, kind: int, number: int, data: bytes = b"") -> None:
        """Queue a frame."""

    def forget(self, number: int) -> None:
        """That stream is over."""


class Stream(asyncio.Protocol):
    """One connection: ours to the caller's listener, joined to one in the box."""

    def __init__(self, link: FrameSink, number: int) -> None:
        self._link, self.number = link, number
        self._transport: asyncio.Transport | None = None
        self._credit = self._room = frames.WINDOW
        self._held, self._slow, self._owed = bytearray(), True, 0
        self._unsent: deque[bytes] = deque()
        self._paused = False
        self._told_all = self._heard_all = self._said_all = self._over = False
        # In this order: the box has said its last; so has our side; the box knows that; there is nothing more to do.

    # What the relay says.

    def handle(self, kind: int, payload: bytes) -> None:
        """A frame for this stream."""
        if kind == frames.DATA:
            self._room -= len(payload)
            if self._told_all or self._room < 0:
                raise ValueError(f"stream {self.number} sent more than it may")
            self._held += payload
            self._pass_on()
        elif kind == frames.CREDIT:
            (amount,) = frames.AMOUNT.unpack(payload) if len(payload) == frames.AMOUNT.size else (0,)
            self._credit += amount
            if not amount or self._credit > frames.WINDOW:
                raise ValueError(f"stream {self.number} gave back more than it got")
            self.go_on()
        elif kind == frames.EOF:
            self._told_all = True
            self._pass_on()
        else:
            self.cut()
            self._link.forget(self.number)

    def _pass_on(self) -> None:
        if self._slow or self._transport is None:
            return
        if self._held:
            data = bytes(self._held)
            self._held.clear()
            self._owed += len(data)
            self._transport.write(data)
            if self._slow:
                return
        self._give_back()
        if self._told_all and not self._transport.is_closing() and self._transport.can_write_eof():
            with suppress(OSError):
                self._transport.write_eof()
            self._end_if_over()

    def _give_back(self) -> None:
        if self._owed:
            self._room += self._owed
            self._link.put(frames.CREDIT, self.number, frames.AMOUNT.pack(self._owed))
            self._owed = 0

    # What our side says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected to the caller's listener."""
        self._transport = cast("asyncio.Transport", transport)
        if self._over:
            self._transport.abort()
            return
        # Whatever is not in the kernel's hands counts as not passed on.
        self._transport.set_write_buffer_limits(high=0)
        self._slow = False
        self._pass_on()

    def pause_writing(self) -> None:
        """The caller reads slowly."""
        self._slow = True

    def resume_writing(self) -> None:
        """The caller has read all there was."""
        self._slow = False
        if not self._over:
            self._pass_on()

    def data_received(self, data: bytes) -> None:
        """The caller says something."""
        for at in range(0, len(data), frames.MOST_DATA):
            self._unsent.append(data[at : at + frames.MOST_DATA])
        self.go_on()

    def eof_received(self) -> bool:
        """The caller has said its last, but may go on listening."""
        self._heard_all = True
        self.go_on()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller is gone."""
        if self._over:
            return
        self._over = True
        self._link.put(frames.RESET, self.number)
        self._link.forget(self.number)

    def go_on(self) -> None:
        """Send what may be sent; read on, or wait, as there is room."""
        if self._over:
            return
        while self._unsent and self._credit and not self._link.full:
            data = self._unsent.popleft()
            if len(data) > self._credit:
                self._unsent.appendleft(data[self._credit :])
                data = data[: self._credit]
            self._credit -= len(data)
            self._link.put(frames.DATA, self.number, data)
        waits = bool(self._unsent) or not self._credit or self._link.full
        if waits != self._paused and self._transport is not None and not self._heard_all:
            self._paused = waits
            if waits:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
        if self._heard_all and not self._unsent and not self._said_all:
            self._said_all = True
            self._link.put(frames.EOF, self.number)
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._told_all and self._said_all and not self._held and not self._over and self._transport is not None:
            self._over = True
            self._link.forget(self.number)
            self._transport.close()

    def cut(self) -> None:
        """Break the connection off, in whatever state it is."""
        self._over = True
        self._held.clear()
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()
