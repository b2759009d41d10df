"""Puts single paths of a kept folder back as they were at the checkpoint."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable

from rollcage.sandboxes.inside.overlay import is_opaque
from rollcage.sandboxes.local.inside.diff import PathParts, exists, lstat


def uncover(upper: str, parts: PathParts, aside: str, discard: Callable[[str, str], None]) -> bool:
    """Take away what the upper has at a path, so that what is below shines through.

    True where it cannot shine through, because of what the agent made of a folder above it: then it is to be copied.
    """
    hidden = False
    for depth in range(1, len(parts)):
        path = "/".join((upper, *parts[:depth]))
        found = lstat(path)
        if found is None:
            return hidden
        if not stat.S_ISDIR(found.st_mode):
            return True
        hidden = hidden or is_opaque(path)
    path = "/".join((upper, *parts))
    if exists(path):
        # Moved first: a folder is then gone at once, however much is in it.
        os.rename(path, f"{aside}/restored")
        discard(f"{aside}/restored", aside)
    return hidden


def copy_back(before: str, home: str, parts: PathParts) -> None:
    """Copy a path from a view of the checkpoint, making folders of whatever lies above it now."""
    for depth in range(1, len(parts)):
        path = "/".join((home, *parts[:depth]))
        found = lstat(path)
        if found is None or not stat.S_ISDIR(found.st_mode):
            if found is not None:
                os.unlink(path)
            os.mkdir(path)
            os.chmod(path, stat.S_IMODE(os.lstat("/".join((before, *parts[:depth]))).st_mode))
    source, target = "/".join((before, *parts)), "/".join((home, *parts))
    found = lstat(source)
    if found is None:
        return
    if stat.S_ISDIR(found.st_mode):
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
