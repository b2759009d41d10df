"""The base system for tests: made once on this machine, in its own state folder, as for users."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from rollcage.errors import SetupError
from rollcage.sandboxes.images.base import ensure_base
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import BASE


def base_there(state_dir: Path) -> None:
    """Make the base system where it is not there; skips where Debian's packages cannot be had."""

    async def make() -> None:
        async with LocalProvider(state_dir) as provider:
            if not provider.images.has(BASE):
                await ensure_base(provider, print)

    try:
        anyio.run(make)
    except SetupError as error:
        pytest.skip(f"Debian's packages cannot be had here: {error}")


def home_with_base(state_dir: Path, home: Path) -> Path:
    """A state folder with a log of its own, and the machine's layers and images."""
    home.mkdir(parents=True, exist_ok=True)
    for name in ("layers", "images", "cache"):
        (state_dir / name).mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(state_dir / name)
    return home
