"""`rollcage demo`: an example that comes with the package, run with its scripted answers. Nothing else is needed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from rollcage.cli.options import JSON

if TYPE_CHECKING:
    from rollcage.cli.output import Style

NAMES = ("paginate", "wordcount", "merge")


@click.command()
@click.argument("name", type=click.Choice(NAMES), default=NAMES[0], metavar=f"[{'|'.join(NAMES)}]")
@JSON
def demo(name: str, as_json: bool) -> int:
    """Run a bundled example: a real agent, scripted answers.

    The first run fetches OpenCode once. No account, no key, no model, no checkout.

    \b
    Examples:
      rollcage demo
      rollcage demo wordcount --json | jq .reward
    """
    import anyio

    from rollcage.cli.output import environment
    from rollcage.cli.run import run_file
    from rollcage.jobs import with_arguments
    from rollcage.tasks import load
    from rollcage.tasks.files import EXAMPLES

    task = with_arguments(load(EXAMPLES / f"{name}.toml"), {"system": "host"})
    print("demo: in the system of this machine; rollcage setup --base makes one of its own", file=sys.stderr)
    style: Style = "json" if as_json else "view"
    return anyio.run(run_file, environment(), task, style, backend_options={"use_uvloop": True})
