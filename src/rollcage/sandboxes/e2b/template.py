"""Builds an E2B template with an agent baked in, so that a box is ready when it is there and nothing is sent to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from rollcage.errors import SandboxError
from rollcage.sandboxes.e2b.cloud import boundary
from rollcage.sandboxes.e2b.provider import MARKER, E2BProvider, marker
from rollcage.sandboxes.images import base
from rollcage.sandboxes.layers import Layer
from rollcage.types import HOME

PACKAGES = base.PACKAGES
"""Debian packages every template gets: those of the base system, so that tasks find the same programs in it."""

Say = Callable[[str], None]


class TemplateRecipe(NamedTuple):
    """What goes into a template."""

    layers: Sequence[Layer] = ()
    """Topmost first; usually the agent's."""
    packages: Sequence[str] = PACKAGES
    """Debian packages, installed by root."""
    setup: Sequence[str] = ()
    """Bash commands, run as root with a network before anything else is put in."""
    cpus: int = 2
    """Processors of its boxes."""
    memory_mb: int = 4096
    """Memory of its boxes."""


async def build_template(provider: E2BProvider, name: str, recipe: TemplateRecipe, say: Say) -> str:
    """Build it in E2B's cloud, and return its id there. Boxes with `template = NAME` are then made of it."""
    from e2b import AsyncTemplate, BuildException
    from e2b.template.logger import LogEntry

    provider.cloud.check()
    archives = [await provider.archive(layer) for layer in recipe.layers]
    folder = archives[0].parent if archives else Path.cwd()
    template = AsyncTemplate(file_context_path=folder).from_base_image()
    if recipe.packages:
        names = " ".join(map(quote, recipe.packages))
        template.run_cmd(f"apt-get update -q && apt-get install -qy --no-install-recommends {names}", user="root")
    for command in recipe.setup:
        template.run_cmd(command, user="root")
    template.run_cmd(f"find {HOME} -mindepth 1 -delete", user="user")
    for archive in reversed(archives):
        place = f"/tmp/{archive.name}"  # noqa: S108 - in the template
        template.copy(archive.name, place, user="user")
        template.run_cmd(f"tar -xzf {place} --no-same-owner -C {HOME} && rm -f {place}", user="user")
    template.run_cmd(f"printf '%s\\n' {quote(marker(archives))} > {HOME}/{MARKER}", user="user")

    def told(entry: LogEntry) -> None:
        say(entry.message)

    try:
        with boundary(f"cannot build the template {name}"):
            options = provider.cloud.options
            built = await AsyncTemplate.build(
                template, name, cpu_count=recipe.cpus, memory_mb=recipe.memory_mb, on_build_logs=told, **options
            )
    except SandboxError as error:
        if isinstance(error.__cause__, BuildException):
            raise SandboxError(f"the template {name} cannot be built: {error.__cause__}") from error
        raise
    return built.template_id
