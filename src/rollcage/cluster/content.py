"""What a node needs before it can run a job: layers, images, files of tasks, work that is judged again.

Named by content, sent to each node once. Names are `layer:FOLDER`, `image:NAME`, `tree:DIGEST` and `work:DIGEST`.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import zstandard
from anyio import to_thread

from rollcage.agents.stored import StoredWork
from rollcage.rollout.run import RolloutDeps
from rollcage.rollout.setup import keep_trees
from rollcage.runner.registry import WITH_SYSTEMS
from rollcage.sandboxes.images import ImageStore
from rollcage.sandboxes.images.catalog import Image
from rollcage.sandboxes.in_process import InProcessProvider
from rollcage.store.work import WorkStore
from rollcage.types import BASE, Job

PIECE = 8 << 20
"""Bytes of one piece of a packed archive."""


class ContentStore:
    """What this machine has of it."""

    def __init__(self, images: ImageStore, trees: WorkStore, work: WorkStore) -> None:
        self.images, self.layers, self._archives = images, images.layers, {"tree": trees, "work": work}

    @property
    def held(self) -> frozenset[str]:
        """The layers and images that are here."""
        layers = (path.name for path in self.layers.folder.iterdir() if not path.name.startswith("."))
        return frozenset((*(f"layer:{name}" for name in layers), *(f"image:{name}" for name in self.images.names())))

    def missing(self, names: Iterable[str]) -> frozenset[str]:
        """Which of these are not."""
        held = self.held

        def here(name: str) -> bool:
            kind, _, own = name.partition(":")
            return own in self._archives[kind] if kind in self._archives else name in held

        return frozenset(name for name in names if not here(name))

    async def wanted(self, job: Job, deps: RolloutDeps) -> tuple[str, ...]:
        """What this job needs, made here first where it is not there yet; parts before what is made of them."""
        await keep_trees(job.task, deps.trees)
        archives = [f"tree:{tree.digest}" for tree in job.task.all_trees]
        if isinstance(deps.agent, StoredWork):
            archives.append(f"work:{job.agent.config['digest']}")
        if job.sandbox.backend not in WITH_SYSTEMS or isinstance(deps.provider, InProcessProvider):
            return tuple(archives)
        layers = [f"layer:{(await self.layers.ensure(layer)).name}" for layer in deps.agent.layers()]
        specs = (job.sandbox, *(job.sandbox.for_verifier(box) for box in job.task.verifier_boxes))
        named = [spec.template or (BASE if spec.system == BASE else "") for spec in specs]
        # A base system that is not here is made by each node for itself, as on one machine.
        images = [self.images.get(name) for name in dict.fromkeys(named) if name and self.images.has(name)]
        parts = [f"layer:{part}" for image in images for part in image.parts]
        return tuple(dict.fromkeys((*archives, *layers, *parts, *(f"image:{image.name}" for image in images))))

    async def packed(self, name: str) -> list[bytes]:
        """One of them, in pieces."""
        kind, _, own = name.partition(":")
        if kind == "image":
            return [self.images.get(own).model_dump_json().encode()]
        if kind in self._archives:
            return [chunk async for chunk in _gathered(self._archives[kind].get(own))]
        return await to_thread.run_sync(lambda: list(_tarred(self.layers.folder / own)))

    async def receive(self, name: str, pieces: Sequence[bytes]) -> None:
        """Have one of them from now on."""
        kind, _, own = name.partition(":")
        if kind == "image":
            self.images.put(Image.model_validate_json(pieces[0]))
        elif kind in self._archives:
            await self._archives[kind].put(_each(pieces))
        else:

            async def build(folder: Path) -> None:
                await to_thread.run_sync(_untar, folder, pieces)

            await self.layers.adopt(own, build)


async def _each(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def _gathered(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= PIECE:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _tarred(folder: Path) -> Iterator[bytes]:
    """A folder as a compressed archive: its owner is settled where it is unpacked."""
    argv = ["tar", "--create", "--sparse", "--file=-", "--directory", str(folder), "."]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        reader = zstandard.ZstdCompressor(level=1, threads=2).stream_reader(process.stdout)
        while piece := reader.read(PIECE):
            yield piece
    if process.returncode:
        raise OSError(f"tar left {folder} with exit code {process.returncode}")


def _untar(folder: Path, pieces: Iterable[bytes]) -> None:
    argv = ["tar", "--extract", "--no-same-owner", "--same-permissions", "--file=-", "--directory", str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        opened = zstandard.ZstdDecompressor().decompressobj()
        for piece in pieces:
            process.stdin.write(opened.decompress(piece))
    if process.returncode:
        raise OSError(f"tar left {folder} with exit code {process.returncode}")
