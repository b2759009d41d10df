"""How overlay marks, in the folder that is written to, what was deleted or replaced."""

from __future__ import annotations

import os
import stat


def is_whiteout(found: os.stat_result) -> bool:
    """Whether this is overlay's mark for a deleted name."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def is_opaque(path: str) -> bool:
    """Whether this upper folder hides what lies below it: it was deleted and made again."""
    try:
        return os.getxattr(path, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False
