"""Builds E2B templates from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import anyio

from rollcage.assembly import agent, e2b_provider
from rollcage.cli import codes
from rollcage.cli.output import environment, program, write_json
from rollcage.cli.text import one_line


def build(name: str, setup: Sequence[str], as_json: bool) -> int:
    """`rollcage image e2b`."""
    return anyio.run(_build, name, setup, as_json)


async def _build(name: str, setup: Sequence[str], as_json: bool) -> int:
    from rollcage.sandboxes.e2b_template import TemplateRecipe, build_template

    def say(line: str) -> None:
        if not as_json:
            print(one_line(line), file=sys.stderr, flush=True)

    settings = environment()
    async with e2b_provider(settings) as provider:
        recipe = TemplateRecipe(layers=agent(settings).layers(), setup=setup)
        template_id = await build_template(provider, name, recipe, say)
    if as_json:
        write_json({"name": name, "template_id": template_id})
    else:
        print(f"{name} is ready at E2B: {program()} run TASK.toml --sandbox e2b --template {name}")
    return codes.SUCCEEDED
