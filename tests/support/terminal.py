"""Runs a command on a real pseudo-terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 120.0
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>]?[A-Z0-9]?")


class Terminal:
    """The screen and the keyboard of one command."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.seen = ""
        """All that was written so far, codes included."""

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._descriptor, keys.encode())

    def until(self, words: str, *, after: int = 0) -> str:
        """What is on the screen once these words are; without codes."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.plain[after:]:
            assert time.monotonic() < deadline, f"{words!r} never came: {self.seen!r}"
            if not self._read():
                raise AssertionError(f"it ended before {words!r} came: {self.seen!r}")
        return self.plain[after:]

    def rest(self) -> str:
        """All of its output, once it has ended; without codes."""
        while self._read():
            pass
        return self.plain

    @property
    def plain(self) -> str:
        """What was written so far, without codes."""
        return CODES.sub("", self.seen).replace("\r\n", "\n")

    def _read(self) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], PATIENCE_S)
        assert ready, f"nothing more came: {self.seen!r}"
        try:
            chunk = os.read(self._descriptor, 65536)
        except OSError:  # a terminal whose last program is gone
            return False
        self.seen += chunk.decode(errors="replace")
        return bool(chunk)


@contextmanager
def terminal(command: Sequence[str], env: Mapping[str, str], home: Path, columns: int = 80) -> Iterator[Terminal]:
    """Run the command on a terminal while the block lasts."""
    process_id, descriptor = pty.fork()
    if process_id == 0:
        try:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
            os.chdir(home)
            os.execve(command[0], list(command), {"TERM": "xterm-256color", **env})
        finally:
            os._exit(127)
    try:
        yield Terminal(descriptor)
    finally:
        os.close(descriptor)  # hangs up: whatever still runs there ends
        os.waitpid(process_id, 0)
