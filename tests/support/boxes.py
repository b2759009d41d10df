"""What the sandbox tests share: a real box, programs to run in it, and a look at the host's processes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rollcage.sandboxes.base import Exit, Sandbox, run
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.box import LocalBox
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec

ROOT = os.geteuid() == 0


@asynccontextmanager
async def a_box(folder: Path, *layers: Layer, **limits: Any) -> AsyncIterator[LocalBox]:
    """One box of a provider of its own."""
    async with LocalProvider(folder) as provider, provider.open(SandboxSpec(**limits), layers) as box:
        yield box


async def python(box: Sandbox, script: str, **more: Any) -> Exit:
    """Run Python text in a box."""
    return await run(box, ["python3", "-I", "-c", script], **more)


def living(marker: str) -> list[int]:
    """Processes on this machine that have the marker in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def descriptors() -> int:
    """How many descriptors this process holds."""
    return len(os.listdir("/proc/self/fd"))
