"""Layers: prebaked pieces of a home directory, built once, named by their content, shared by all boxes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layer:
    """A recipe for a piece of home directory: `build` fills an empty folder; `key` names what it will contain."""

    name: str
    """For people: `opencode`."""
    key: str
    """Changes whenever the content would: versions, hashes, seeded text."""
    build: Callable[[Path], Awaitable[None]]
    """Fills the folder it is given, as the caller of this process; ownership is settled afterwards."""
