"""A small folder of plain files, whole: what a box can tell of one without a command in it that looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class FolderEntry(NamedTuple):
    """A file or a folder in it."""

    path: str
    """Empty for the folder itself."""
    mode: int
    mtime: int
    data: bytes | None
    """What a file holds; None for a folder."""


@runtime_checkable
class ReadsFolders(Protocol):
    """A box that reads a small folder whole."""

    async def plain_contents(self, folder: str, empty: Sequence[str]) -> list[FolderEntry] | None:
        """A folder and all that is in it, in no order. None where it takes a command: where there is more than a
        little, or links, pipes, repositories, names that are no text, or what its owner may not read.

        The folders `empty` are made where nothing is there yet; where something is, it takes a command too.
        No command may be running.
        """
