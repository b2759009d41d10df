"""What can be typed after `rollcage sandbox`. Only click is imported here: help must come at once."""

from __future__ import annotations

import click


@click.group()
def sandbox() -> None:
    """The places where agents run."""


@sandbox.command()
@click.argument("backend")
@click.option("--only", multiple=True, metavar="NAME", help="A check or a family of checks; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, and nothing else.")
def check(backend: str, only: tuple[str, ...], as_json: bool) -> int:
    """Try out a backend: everything that a box must hold, and what it must withstand.

    Exit code 0: it is fit for use. 1: a check failed. 3: no box can be opened here.
    """
    from rollcage.cli import conformance

    return conformance.check(backend, only, as_json)
