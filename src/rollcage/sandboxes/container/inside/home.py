"""Makes a home directory out of layers that lie elsewhere in the container, and looks at how the container is bound."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

LARGE = 1 << 20
"""Larger files are not copied: home, which is in memory, gets a symlink to the read-only original."""


_BOUNDS = {
    "memory": ("memory.max", "memory/memory.limit_in_bytes"),
    "pids": ("pids.max", "pids/pids.max"),
    "cpus": ("cpu.max", "cpu/cpu.cfs_quota_us"),
}


def bounds() -> dict[str, int]:
    """What the cgroups of this container say, by version 2 or 1; what they do not bound is left out."""
    found: dict[str, int] = {}
    for name, files in _BOUNDS.items():
        for file in files:
            try:
                said = Path("/sys/fs/cgroup", file).read_text().split()
            except OSError:
                continue
            if said and said[0].isdigit():
                found[name] = int(said[0])
                break
    return found


def populate_home(layers: Sequence[str], home: str) -> None:
    """Lay the layers over the home directory, topmost first. Nothing of an agent's has run yet."""
    for layer in reversed(layers):
        _lay(Path(layer), Path(home))


def _lay(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        place = target / entry.name
        status = entry.lstat()
        if not stat.S_ISDIR(status.st_mode):
            _clear(place)
            if stat.S_ISREG(status.st_mode) and status.st_size > LARGE:
                place.symlink_to(entry)
            else:
                shutil.copy2(entry, place, follow_symlinks=False)
            continue
        if place.is_symlink() or not place.is_dir():
            _clear(place)
            place.mkdir()
        place.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        _lay(entry, place)


def _clear(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
