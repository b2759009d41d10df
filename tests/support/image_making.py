"""What the tests of images share: making them quietly, and looking at what was made."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

from rollcage.sandboxes.base import sh
from rollcage.sandboxes.images.build import Built, LayerBuilder, Recipe
from rollcage.sandboxes.images.imports import ImageSource, import_image
from rollcage.sandboxes.local.box import LocalBox
from rollcage.sandboxes.local.provider import LocalProvider


def quiet(line: str) -> None:
    """Nobody listens."""


async def build(provider: LocalProvider, name: str, *setup: str, rebuild: bool = False, **more: Any) -> Built:
    recipe = Recipe.model_validate({"setup": setup, **more})
    return await LayerBuilder(provider).build(name, recipe, quiet, rebuild=rebuild)


async def said(box: LocalBox, script: str) -> str:
    ended = await sh(box, script)
    assert ended.code == 0, ended.stderr.text
    return ended.stdout.text


def folders(provider: LocalProvider) -> set[str]:
    return {path.name for path in provider.layers.folder.iterdir() if path.is_dir()}


def tarred(folder: Path, target: Path, mode: str = "w") -> Path:
    more = {"w:gz": {"compresslevel": 1}, "w:bz2": {"compresslevel": 1}, "w:xz": {"preset": 0}}.get(mode, {})
    with tarfile.open(target, mode, **more) as tar:  # type: ignore[call-overload]
        tar.add(folder, ".")
    return target


async def imported(provider: LocalProvider, name: str, path: Path, **more: object) -> Built:
    return await import_image(provider, name, ImageSource.model_validate({"path": path, **more}), quiet)
