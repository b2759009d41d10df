"""Reads what was changed from an overlay's upper folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping

from rollcage.sandboxes.inside.overlay import is_opaque, is_whiteout

HOME = "/home/user"
MOST = 200
"""How many changed paths are named at most."""

_MOST_FILES = 4000
"""As MOST, of single files."""

PathParts = tuple[str, ...]


def lstat(path: str) -> os.stat_result | None:
    """lstat, or None where there is nothing (or nothing that can be named)."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def exists(path: str) -> bool:
    """Whether something is there, if only a symlink that leads nowhere."""
    return lstat(path) is not None


def changes(upper: str, base: str, kept: Collection[PathParts], prefix: str = HOME) -> list[str]:
    """Paths outside `kept` that were made, changed or deleted: `upper` against the view `base` without it."""
    found: list[str] = []
    mine, theirs = os.lstat(upper), os.lstat(base)
    if mine.st_mode != theirs.st_mode:
        found.append(prefix or "/")
    waiting: list[tuple[PathParts, bool]] = [((), False)]
    while waiting and len(found) < MOST:
        folder, hidden = waiting.pop()
        for name in sorted(os.listdir("/".join((upper, *folder)))):
            parts = (*folder, name)
            if parts in kept or len(found) >= MOST:
                continue
            verdict, covers = _compare(upper, base, parts, hidden)
            leads_to_kept = any(path[: len(parts)] == parts for path in kept)
            if verdict == "changed" or (verdict == "new" and not leads_to_kept):
                found.append("/".join((prefix, *parts)))
            if not covers or (leads_to_kept and _is_folder(upper, parts)):
                waiting.append((parts, covers))
    return [path.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for path in found]


def files_since(places: Mapping[str, str], since: float, without: Collection[str]) -> list[str]:
    """Regular files whose status changed after that time, as commands name them, outside these paths.

    `places`: folders, and what commands know them as. What is hidden at the top of any but home is not told.
    """
    found: list[str] = []
    waiting = list(places.items())
    while waiting and len(found) < _MOST_FILES:
        folder, name = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue  # closed to everybody, or too deep to be named
        for entry in entries:
            path = f"{name}/{entry.name}"
            if path in without or (folder in places and name != HOME and entry.name.startswith(".")):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, path))
            elif entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_ctime > since:
                found.append(path)
    return sorted(path.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for path in found[:_MOST_FILES])


def _is_folder(upper: str, parts: PathParts) -> bool:
    found = lstat("/".join((upper, *parts)))
    return found is not None and stat.S_ISDIR(found.st_mode)


def _compare(upper: str, base: str, parts: PathParts, hidden: bool) -> tuple[str, bool]:
    """`new`, `changed` or `same`; and whether it covers what the base has there (false for a folder both have)."""
    path = "/".join((upper, *parts))
    mine = lstat(path)
    theirs = None if hidden else lstat("/".join((base, *parts)))
    if mine is None or is_whiteout(mine) or not stat.S_ISDIR(mine.st_mode):
        return "changed", True
    if theirs is None:
        return "new", True
    if not stat.S_ISDIR(theirs.st_mode) or is_opaque(path):
        return "changed", True
    return ("same" if mine.st_mode == theirs.st_mode else "changed"), False
