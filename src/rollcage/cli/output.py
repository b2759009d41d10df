"""Where a command's output goes: a view for people, one JSON document, or JSON lines."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from typing import Any, Literal

from pydantic import BaseModel

from rollcage.cli.screen import View, screen
from rollcage.cli.summary import headline, summary_of
from rollcage.events import Entry
from rollcage.results.fold import Rollout
from rollcage.results.result import result_of
from rollcage.settings import Settings

Style = Literal["view", "json", "lines"]


def environment() -> Settings:
    """The settings of this process; libraries keep quiet unless ROLLCAGE_DEBUG is set."""
    settings = Settings.from_environ()
    if not settings.debug:
        # Without any handler, Python writes warnings and tracebacks of libraries to stderr.
        logging.getLogger().addHandler(logging.NullHandler())
    return settings


def program() -> str:
    """How to call this command again: its name where the shell finds it, else its path from here."""
    if shutil.which("rollcage") or not sys.argv[0].endswith("rollcage"):
        return "rollcage"
    return min(sys.argv[0], os.path.relpath(sys.argv[0]), key=len)


def write_json(document: BaseModel | list[Any] | dict[str, Any]) -> None:
    """One document on one line. Pure ASCII: safe on any terminal and in any encoding."""
    data = document.model_dump(mode="json") if isinstance(document, BaseModel) else document
    print(json.dumps(data), flush=True)


class Output:
    """Shows one rollout in the style that was asked for."""

    def __init__(self, settings: Settings, style: Style, *, hint: str) -> None:
        self._settings, self._style = settings, style
        # With --json stdout belongs to the document; a person at the terminal still sees what happens.
        on_terminal = style == "json" and sys.stderr.isatty()
        self.view: View | None = None
        if style == "view" or on_terminal:
            self.view = View(screen(settings, file=sys.stderr if on_terminal else sys.stdout), hint=hint)

    def show(self, entry: Entry) -> None:
        """One entry of the log, as it happens."""
        if self._style == "lines":
            write_json(entry)
        elif self.view:
            self.view.show(entry)

    def note(self, message: str) -> None:
        """Something that is not in the log."""
        if self.view:
            self.view.note(message)
        else:
            print(f"rollcage: {message}", file=sys.stderr, flush=True)

    def finish(self, rollout: Rollout) -> None:
        """What it came to."""
        if self.view:
            marks = self.view.narrator.marks
            whole = self._style == "view"
            self.view.console.put(
                summary_of(rollout, marks, self._settings.log_path, brief=True, program=program())
                if whole
                else headline(rollout, marks)
            )
        if self._style == "json":
            write_json(result_of(rollout))

    def leave(self) -> None:
        """Give the terminal back at once."""
        if self.view:
            self.view.close()
