"""Prepares the agent before its first rollout, and shows how it goes: `setup`, `demo` and `run`. Makes the base system,
where that is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TextIO

import anyio

from rollcage.agents.base import Agent
from rollcage.cli.start_cost import start_costs
from rollcage.cli.text import seconds_of
from rollcage.errors import UsageError
from rollcage.sandboxes.layers import Layer
from rollcage.settings import Settings
from rollcage.types import JsonObject
from rollcage.wiring import agents, provider

_TERMINAL_S, _PLAIN_S = 0.2, 2.0
"""How often progress is told: a line that is written over, and lines of their own."""


def known_agent(settings: Settings, name: str) -> Agent:
    """The agent of this name; UsageError where there is none."""
    known = agents(settings)
    if name not in known:
        raise UsageError(f"no {name!r} here", argument="agent", remedy=f"known: {', '.join(sorted(known))}")
    return known[name]


def missing_layers(settings: Settings, name: str = "opencode") -> Sequence[Layer]:
    """What is not prepared yet on this machine, of one agent."""
    layers = provider(settings).layers
    return [layer for layer in known_agent(settings, name).layers() if not layers.has(layer)]


async def prepare(settings: Settings, name: str = "opencode") -> Sequence[Layer]:
    """Fetch and build what is missing of an agent, once, and tell about it on stderr; what was built."""
    missing, layers = missing_layers(settings, name), provider(settings).layers
    for layer in missing:
        started = anyio.current_time()
        tell(f"preparing {layer.name} (once)")
        async with _progress(settings.cache_dir, sys.stderr):
            await layers.ensure(layer)
        tell(f"{layer.name} is ready ({seconds_of(anyio.current_time() - started)})")
    return missing


def describe(settings: Settings) -> list[JsonObject]:
    """Every agent: what it is, whether it is here and how large it is."""
    store, costs = provider(settings).layers, start_costs(settings)
    rows: list[JsonObject] = []
    for name, known in agents(settings).items():
        layers = known.layers()
        here = [store.folder_of(layer) for layer in layers]
        size = sum(path.lstat().st_size for folder in here for path in folder.rglob("*") if not path.is_dir())
        rows.append(
            {
                "name": name,
                "version": known.version,
                "wire": getattr(known, "wire", ""),
                "installed": all(folder.exists() for folder in here) if layers else None,
                "bytes": size,
                "start_cpu_s": costs.get(f"{name}@{known.version}"),
            }
        )
    return rows


async def prepare_base(settings: Settings) -> bool:
    """Make the base system, and tell about it on stderr; whether there was anything to do."""
    from rollcage.sandboxes.images.base import ensure_base

    started = anyio.current_time()
    async with provider(settings) as boxes:
        built = await ensure_base(boxes, tell)
    took = seconds_of(anyio.current_time() - started)
    tell(f"the base system is {'ready' if built.new else 'there already'} ({took}): {built.image.source}")
    return built.new


def tell(words: str) -> None:
    """A line for whoever waits, on stderr."""
    print(f"setup: {words}", file=sys.stderr, flush=True)


@asynccontextmanager
async def _progress(folder: Path, file: TextIO) -> AsyncIterator[None]:
    """Tell how much has been downloaded while the block lasts: on a terminal one line, elsewhere plain lines."""
    rewrite = file.isatty()

    async def count() -> None:
        there = await anyio.to_thread.run_sync(_names, folder)
        told = 0
        while True:
            await anyio.sleep(_TERMINAL_S if rewrite else _PLAIN_S)
            size = await anyio.to_thread.run_sync(_largest, folder, there)
            if size > max(told, 100_000):
                told = size
                line = f"setup: {size / 1e6:.1f} MB fetched"
                print(f"\r{line}" if rewrite else line, end="" if rewrite else "\n", file=file, flush=True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            if rewrite:
                print("\r\033[K", end="", file=file, flush=True)


def _names(folder: Path) -> frozenset[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return frozenset(path.name for path in folder.iterdir())


def _largest(folder: Path, but: frozenset[str]) -> int:
    """The size of the largest file below what was not there before: npm keeps what it fetches twice."""
    largest = 0
    for name in _names(folder) - but:
        # Drafts come and go, whole folders of them: a walk passes over those.
        below = [Path(place, file) for place, _, files in os.walk(folder / name) for file in files]
        for path in below or [folder / name]:
            with suppress(OSError):
                largest = max(largest, path.lstat().st_size if not path.is_dir() else 0)
    return largest
