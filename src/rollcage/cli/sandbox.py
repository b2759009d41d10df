"""`rollcage sandbox`: try out the backends, in whose boxes agents run. Heavy parts are imported when used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import click

from rollcage.cli import codes
from rollcage.cli.completion import named
from rollcage.cli.options import JSON

if TYPE_CHECKING:
    from rollcage.cli.screen import Screen
    from rollcage.conformance.sandboxes import CheckVerdict
    from rollcage.settings import Settings


@click.group()
def sandbox() -> None:
    """The backends, in whose boxes agents run.

    \b
    Example:
      rollcage sandbox check local
    """


@sandbox.command()
@click.argument("backend", shell_complete=named)
@click.option("--only", multiple=True, metavar="NAME", help="A check or a family of checks; may be repeated.")
@JSON
def check(backend: str, only: tuple[str, ...], as_json: bool) -> int:
    """Try out a backend: what its boxes must hold and withstand.

    Exit code 0: it is fit for use. 1: a check failed. 3: no box can be opened here.

    \b
    Examples:
      rollcage sandbox check local
      rollcage sandbox check container --only files --json
    """
    import anyio

    from rollcage.cli.output import environment

    return anyio.run(_check, environment(), backend, only, as_json)


async def _check(settings: Settings, backend: str, only: Sequence[str], as_json: bool) -> int:
    from rollcage.conformance.sandboxes import check as verdicts
    from rollcage.conformance.sandboxes import chosen
    from rollcage.conformance.sandboxes.backends import traits_of
    from rollcage.errors import UsageError
    from rollcage.types import SandboxSpec
    from rollcage.wiring import providers

    known = providers(settings)
    if backend not in known:
        raise UsageError(f"no sandbox backend is called {backend!r}; there are {', '.join(known)}")
    chosen(only)
    async with known[backend]() as provider:
        async with provider.open(SandboxSpec(backend=backend, template=traits_of(provider).template)) as box:
            # Where no box can be opened at all, that is the one thing to report.
            notes = box.notes
        return await report(settings, {"backend": backend}, verdicts(provider, only=only), as_json, notes)


async def report(
    settings: Settings,
    about: dict[str, str],
    verdicts: AsyncIterator[CheckVerdict],
    as_json: bool,
    notes: Sequence[str] | None = None,
) -> int:
    """Show what each check came to. `about`: what is tried, its name first."""
    from rollcage.cli.output import write_json
    from rollcage.cli.screen import screen

    console, found = screen(settings), []
    async for verdict in verdicts:
        found.append(verdict)
        if not as_json:
            _print_verdict(console, verdict)
    failed = any(verdict.outcome == "failed" for verdict in found)
    if as_json:
        rows = [verdict.model_dump(mode="json") for verdict in found]
        told = {} if notes is None else {"notes": list(notes)}
        write_json({**about, "conforms": not failed, **told, "checks": rows})
    else:
        _conclude(console, next(iter(about.values())), found, notes or ())
    return codes.BROKEN if failed else codes.OK


def _print_verdict(console: Screen, verdict: CheckVerdict) -> None:
    """One line for a check, and what was seen where it failed."""
    from rich.text import Text

    from rollcage.cli.narrator import BAD, DIM, GOOD, STRONG, WARN
    from rollcage.cli.screen import marks_for
    from rollcage.cli.text import one_line, seconds_of

    marks = marks_for(console)
    mark = {"passed": (f"{marks.good} ", GOOD), "failed": (f"{marks.bad} ", BAD), "not_applicable": ("- ", WARN)}
    took = seconds_of(verdict.seconds)
    line = Text.assemble(mark[verdict.outcome], (verdict.name, STRONG), (f"  {verdict.holds} ({took})", DIM))
    console.print(line, soft_wrap=True)
    if verdict.detail:
        style = BAD if verdict.outcome == "failed" else DIM
        console.print(Text(f"    {one_line(verdict.detail)}", style=style), soft_wrap=True)


def _conclude(console: Screen, backend: str, found: Sequence[CheckVerdict], notes: Sequence[str]) -> None:
    """The last line: how many hold."""
    from rich.text import Text

    from rollcage.cli.narrator import BAD, GOOD, STRONG, WARN
    from rollcage.cli.text import one_line

    for note in notes:
        console.print(Text(f"! {one_line(note)}", style=WARN), soft_wrap=True)
    count = {outcome: sum(verdict.outcome == outcome for verdict in found) for outcome in ("failed", "not_applicable")}
    apart = f", {count['not_applicable']} not applicable" if count["not_applicable"] else ""
    tried = len(found) - count["not_applicable"]
    result = f"{count['failed']} of {tried} checks failed" if count["failed"] else f"all {tried} checks hold"
    console.print(Text(f"{backend}: {result}{apart}", style=f"{STRONG} {BAD if count['failed'] else GOOD}"))
