"""Runs in a box that nobody can reach: carries connections to one port over its own standard input and output.

Standard library only, for Python 3.8 and later; its text is handed to `python3 -c`. A frame is a kind, the number of a
stream, the length of what follows, and that. Each side may have `WINDOW` bytes of a stream on the way; the other side
gives back what it has passed on, so that a slow reader holds up nobody but its own stream, and nothing grows.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from itertools import islice

READY, REFUSED, OPEN, DATA, CREDIT, EOF, RESET = range(1, 8)
HEAD = struct.Struct("!BII")
AMOUNT = struct.Struct("!I")
WINDOW = 1 << 18
"""How much of one stream, in one direction, may be on the way."""
MOST_DATA = 1 << 16
"""The longest frame."""
MOST_STREAMS = 256
"""How many connections are carried at once; more wait to be accepted."""

_FULL, _ROOM = 1 << 20, 1 << 18
_READ = 1 << 18


class _Gone(Exception):
    """Whoever started us has closed our input or our output: there is nothing left to do."""


class _Connection:
    """One connection from inside the box."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number, self.sock = number, sock
        self.credit, self.owed = WINDOW, 0
        self.waiting: deque[memoryview] = deque()
        self.heard_all = self.told_all = False
        """Whether the box, and whether the other side, has said its last."""
        self.mask = 0


class _Relay:
    """A listener, its connections, and the two pipes they go through."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._streams: dict[int, _Connection] = {}
        self._by_fd: dict[int, _Connection] = {}
        self._last = 0
        self._in = b""
        self._out: deque[memoryview] = deque()
        self._out_size = 0
        self._full = False
        self._accepting = False
        self._poll = select.epoll()
        self._poll.register(0, select.EPOLLIN)
        self._writing = False

    def run(self) -> None:
        """Serve until our input ends."""
        self._put(READY)
        while True:
            self._flush()
            self._settle()
            for fd, event in self._poll.poll():
                if fd == 0:
                    self._listen_to_owner()
                elif fd == self._listener.fileno():
                    self._accept()
                elif fd in self._by_fd:
                    self._serve(self._by_fd[fd], event)

    # To the owner.

    def _put(self, kind: int, number: int = 0, data: bytes = b"") -> None:
        self._out.append(memoryview(HEAD.pack(kind, number, len(data)) + data))
        self._out_size += HEAD.size + len(data)

    def _flush(self) -> None:
        while self._out:
            try:
                sent = os.writev(1, list(islice(self._out, 64)))
            except BlockingIOError:
                break
            except OSError as error:
                raise _Gone from error
            self._out_size -= sent
            while sent:
                first = self._out[0]
                if sent < len(first):
                    self._out[0] = first[sent:]
                    break
                sent -= len(first)
                self._out.popleft()
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            if self._writing:
                self._poll.register(1, select.EPOLLOUT)
            else:
                self._poll.unregister(1)

    def _settle(self) -> None:
        """Stop to take things in while the way out is full; go on when there is room."""
        full = self._out_size > (_ROOM if self._full else _FULL)
        if full != self._full:
            self._full = full
            for stream in self._streams.values():
                self._watch(stream)
        accepting = not full and len(self._streams) < MOST_STREAMS
        if accepting != self._accepting:
            self._accepting = accepting
            if accepting:
                self._poll.register(self._listener, select.EPOLLIN)
            else:
                self._poll.unregister(self._listener)

    # From the owner.

    def _listen_to_owner(self) -> None:
        try:
            data = os.read(0, _READ)
        except BlockingIOError:
            return
        if not data:
            raise _Gone
        data, at = self._in + data, 0
        while len(data) - at >= HEAD.size:
            kind, number, length = HEAD.unpack_from(data, at)
            if len(data) - at < HEAD.size + length:
                break
            payload = data[at + HEAD.size : at + HEAD.size + length]
            at += HEAD.size + length
            stream = self._streams.get(number)
            if stream is not None:
                self._handle(stream, kind, payload)
        self._in = data[at:]

    def _handle(self, stream: _Connection, kind: int, payload: bytes) -> None:
        if kind == DATA:
            stream.waiting.append(memoryview(payload))
            self._send(stream)
        elif kind == CREDIT:
            stream.credit += AMOUNT.unpack(payload)[0]
            self._watch(stream)
        elif kind == EOF:
            stream.told_all = True
            self._send(stream)
        elif kind == RESET:
            self._drop(stream, reset=True)

    # To and from the box.

    def _accept(self) -> None:
        while len(self._streams) < MOST_STREAMS:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._last += 1
            stream = _Connection(self._last, sock)
            self._streams[stream.number] = self._by_fd[sock.fileno()] = stream
            self._put(OPEN, stream.number)
            self._watch(stream)

    def _watch(self, stream: _Connection) -> None:
        mask = 0
        if not stream.heard_all and stream.credit and not self._full:
            mask |= select.EPOLLIN
        if stream.waiting:
            mask |= select.EPOLLOUT
        if mask == stream.mask:
            return
        # Hang-ups cannot be masked: a stream that nothing is wanted of is not watched at all.
        if not stream.mask:
            self._poll.register(stream.sock, mask)
        elif not mask:
            self._poll.unregister(stream.sock)
        else:
            self._poll.modify(stream.sock, mask)
        stream.mask = mask

    def _serve(self, stream: _Connection, event: int) -> None:
        if event & select.EPOLLOUT:
            self._send(stream)
        if stream.number in self._streams and event & ~select.EPOLLOUT:
            self._receive(stream)

    def _receive(self, stream: _Connection) -> None:
        if self._out_size > _FULL:
            return
        if stream.heard_all or not stream.credit or self._full:
            # Only an error can have woken us.
            if stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or stream.heard_all:
                self._fail(stream)
            return
        try:
            data = stream.sock.recv(min(MOST_DATA, stream.credit))
        except BlockingIOError:
            return
        except OSError:
            self._fail(stream)
            return
        if data:
            stream.credit -= len(data)
            self._put(DATA, stream.number, data)
            self._watch(stream)
            return
        stream.heard_all = True
        self._put(EOF, stream.number)
        self._watch(stream)
        self._end_if_over(stream)

    def _send(self, stream: _Connection) -> None:
        try:
            while stream.waiting:
                sent = stream.sock.send(stream.waiting[0])
                stream.owed += sent
                if sent < len(stream.waiting[0]):
                    stream.waiting[0] = stream.waiting[0][sent:]
                else:
                    stream.waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._fail(stream)
            return
        if stream.owed >= WINDOW // 4 or (stream.owed and not stream.waiting):
            self._put(CREDIT, stream.number, AMOUNT.pack(stream.owed))
            stream.owed = 0
        if stream.told_all and not stream.waiting:
            with suppress(OSError):
                stream.sock.shutdown(socket.SHUT_WR)
        self._watch(stream)
        self._end_if_over(stream)

    def _end_if_over(self, stream: _Connection) -> None:
        if stream.heard_all and stream.told_all and not stream.waiting:
            self._drop(stream)

    def _fail(self, stream: _Connection) -> None:
        self._put(RESET, stream.number)
        self._drop(stream, reset=True)

    def _drop(self, stream: _Connection, *, reset: bool = False) -> None:
        if self._streams.pop(stream.number, None) is None:
            return
        del self._by_fd[stream.sock.fileno()]
        if stream.mask:
            self._poll.unregister(stream.sock)
        if reset:
            # The box is told that something broke, not that all was said.
            with suppress(OSError):
                stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.sock.close()


def main() -> None:
    """Listen on the port that is the first argument; tell the owner how that went; serve."""
    os.set_blocking(0, False)
    os.set_blocking(1, False)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(sys.argv[1])))
        listener.listen(MOST_STREAMS)
    except OSError as error:
        why = "it is already in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        os.write(1, HEAD.pack(REFUSED, 0, len(why.encode())) + why.encode())
        return
    listener.setblocking(False)
    with suppress(_Gone):
        _Relay(listener).run()
    # Not by way of the interpreter's end: nothing is to be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
