"""The terminal: a console without markup, and the live view of one rollout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import IO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from rollcage.cli.narrator import DIM, FANCY, PLAIN, Marks, Narrator
from rollcage.events import Entry
from rollcage.settings import Settings

WIDEST = 110
"""Lines longer than this are tiring to read."""


class Screen(Console):
    """A rich console without markup, and whose reader may go away."""

    def on_broken_pipe(self) -> None:
        """Let the caller wind down; rich would leave at once."""
        raise BrokenPipeError

    def put(self, pieces: Iterable[RenderableType]) -> None:
        """Show what may hold tables; without a terminal, without the blanks that rich leaves at the ends of lines."""
        if self.is_terminal:
            for piece in pieces:
                self.print(piece)
            return
        with self.capture() as captured:
            for piece in pieces:
                self.print(piece)
        self.out("\n".join(line.rstrip() for line in captured.get().split("\n")), end="", highlight=False)


def screen(settings: Settings, *, file: IO[str] | None = None, width: int | None = None) -> Screen:
    """A console on `file` (standard output unless given)."""
    file = file or sys.stdout
    if isinstance(file, TextIOWrapper):
        # What the encoding lacks is shown as a question mark; it is no reason to fail.
        file.reconfigure(errors="replace")
    # Without a terminal there is no width: rich would fold at 80, and grep would suffer.
    wide = width or (None if file.isatty() else WIDEST)
    return Screen(file=file, width=wide, markup=False, highlight=False, emoji=False, no_color=settings.no_color)


def progress(aside: Screen, what: str) -> Callable[[int, int, str], None]:
    """Tells how far something is: one line that changes, or one line at its end where nobody watches."""

    def tell(done: int, of: int, name: str) -> None:
        line = f"{what}: {done} of {of}"
        if aside.is_terminal and not aside.is_dumb_terminal:
            aside.out(f"\r\x1b[2K{line}  {name}" if done < of else "\r\x1b[2K", end="", highlight=False)
        elif done == of:
            aside.out(line, highlight=False)

    return tell


def marks_for(console: Console) -> Marks:
    """Fancy signs where the encoding has them."""
    return FANCY if console.encoding.lower().startswith("utf") else PLAIN


class View:
    """Shows one rollout while it runs: lines as things happen, and below them what is going on."""

    def __init__(self, console: Screen, *, hint: str = "") -> None:
        self.console = console
        self.narrator = Narrator(marks_for(console), min(console.width, WIDEST), hint)
        self._live: Live | None = None
        self._spinner = Spinner(self.narrator.marks.spinner)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the status line at the bottom while the block lasts; without a terminal there is none."""
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            yield
            return
        self._live = Live(
            get_renderable=self._status,
            console=self.console,
            transient=True,
            refresh_per_second=8,
            redirect_stderr=False,
        )
        try:
            with self._live:
                yield
        finally:
            self._live = None

    def show(self, entry: Entry) -> None:
        """Show one entry of the log."""
        for line in self.narrator.tell(entry):
            self.line(line)

    def line(self, text: Text) -> None:
        """Put a line above the status."""
        self.console.print(text, soft_wrap=True)

    def note(self, message: str) -> None:
        """Show a message that is not in the log."""
        self.line(Text(f"! {message}", style="yellow"))

    def close(self) -> None:
        """Give the terminal back at once: for those who will not wait for the block to end."""
        if self._live is not None:
            self._live.stop()

    def _status(self) -> Spinner | Text:
        if self.narrator.ended:
            return Text("")
        self._spinner.update(text=self.narrator.status(time.time()), style=DIM)
        return self._spinner
