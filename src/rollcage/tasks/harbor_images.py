"""The images of a task folder in Harbor's format: what they are called, and what they are built from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from rollcage.tasks.harbor_config import Config
from rollcage.tasks.trees import tree_of
from rollcage.tasks.warm import InstallStep, script_of, steps_of

NAME = "harbor"
"""The names of images of such tasks begin with it."""
MOST_CONTEXT = 4 << 30
"""Bytes of a folder that an image is built from: read to name the image, and never staged."""


class ImagePlan(NamedTuple):
    """One image of a task."""

    name: str
    context: Path
    """The folder with its Dockerfile."""
    warm: str
    """The script that the build ends with; empty: none."""
    timeout_s: float | None = None
    """How long the task lets it take; None: it does not say."""


def template_of(image: str) -> str:
    """What an image that a task names is called here, once it was imported."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", image).strip("-.")[-64:]


def plan_of(folder: Path, context: Path) -> ImagePlan:
    """The image of one of a task's Dockerfiles, named by all that goes into it, so that the same is built once."""
    tree = tree_of(context, most_bytes=MOST_CONTEXT, remedy="have the Dockerfile fetch what is large")
    digest, warm = tree.digest, script_of(list(warm_steps(folder, context)))
    if warm:
        digest = blake2b(f"{digest}\0{warm}".encode(), digest_size=16).hexdigest()
    return ImagePlan(f"{NAME}-{digest[:24]}", context, warm)


def plans_of(folder: Path) -> list[ImagePlan]:
    """All of a task folder's."""
    places = [folder / "environment", folder, folder / "tests", *sorted(folder.glob("steps/*/tests"))]
    most = _build_timeout(folder)
    return [plan_of(folder, place)._replace(timeout_s=most) for place in places if (place / "Dockerfile").is_file()]


def _build_timeout(folder: Path) -> float | None:
    try:
        said = tomllib.loads((folder / "task.toml").read_text())
        return Config.model_validate(said).environment.build_timeout_sec
    except (OSError, ValueError):  # whoever reads the task says what is wrong
        return None


def warm_steps(folder: Path, context: Path) -> Iterator[InstallStep]:
    """What the verifiers that run in boxes of an image install."""
    if context.name == "tests":
        yield from steps_of(context / "test.sh")
        return
    if context == folder:
        yield from steps_of(folder / "run-tests.sh")
    for tests in (folder / "tests", *sorted(folder.glob("steps/*/tests"))):
        if not (tests / "Dockerfile").is_file():
            yield from steps_of(tests / "test.sh")
