"""Shows the conformance suite at work: one line per check, as it ends."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from rich.text import Text

from rollcage.assembly import providers
from rollcage.cli import codes
from rollcage.cli.narrator import BAD, DIM, GOOD, STRONG, WARN, Marks
from rollcage.cli.output import environment, write_json
from rollcage.cli.screen import Screen, marks_for, screen
from rollcage.cli.text import one_line, seconds_of
from rollcage.errors import UsageError
from rollcage.sandboxes.conformance import Verdict, chosen
from rollcage.sandboxes.conformance import check as verdicts
from rollcage.sandboxes.conformance.backends import traits_of
from rollcage.settings import Settings
from rollcage.types import SandboxSpec


def check(backend: str, only: Sequence[str], as_json: bool) -> int:
    """`rollcage sandbox check`."""
    return anyio.run(_check, environment(), backend, only, as_json)


async def _check(settings: Settings, backend: str, only: Sequence[str], as_json: bool) -> int:
    known = providers(settings)
    if backend not in known:
        raise UsageError(f"no sandbox backend is called {backend!r}; there are {', '.join(known)}")
    chosen(only)
    console, found = screen(settings), []
    async with known[backend]() as provider:
        async with provider.open(SandboxSpec(backend=backend, template=traits_of(provider).template)) as box:
            # Where no box can be opened at all, that is the one thing to say.
            notes = box.notes
        async for verdict in verdicts(provider, only=only):
            found.append(verdict)
            if not as_json:
                _tell(console, marks_for(console), verdict)
    failed = [verdict for verdict in found if verdict.outcome == "failed"]
    if as_json:
        rows = [verdict.model_dump(mode="json") for verdict in found]
        write_json({"backend": backend, "conforms": not failed, "notes": list(notes), "checks": rows})
    else:
        _conclude(console, backend, found, notes)
    return codes.OTHER if failed else codes.SUCCEEDED


def _tell(console: Screen, marks: Marks, verdict: Verdict) -> None:
    mark = {"passed": (f"{marks.good} ", GOOD), "failed": (f"{marks.bad} ", BAD), "not_applicable": ("- ", WARN)}
    took = seconds_of(verdict.seconds)
    line = Text.assemble(mark[verdict.outcome], (verdict.name, STRONG), (f"  {verdict.holds} ({took})", DIM))
    console.print(line, soft_wrap=True)
    if verdict.detail:
        style = BAD if verdict.outcome == "failed" else DIM
        console.print(Text(f"    {one_line(verdict.detail)}", style=style), soft_wrap=True)


def _conclude(console: Screen, backend: str, found: Sequence[Verdict], notes: Sequence[str]) -> None:
    for note in notes:
        console.print(Text(f"! {one_line(note)}", style=WARN), soft_wrap=True)
    count = {outcome: sum(verdict.outcome == outcome for verdict in found) for outcome in ("failed", "not_applicable")}
    apart = f", {count['not_applicable']} not applicable" if count["not_applicable"] else ""
    said = f"{count['failed']} of {len(found)} checks failed" if count["failed"] else f"all {len(found)} checks hold"
    console.print(Text(f"{backend}: {said}{apart}", style=f"{STRONG} {BAD if count['failed'] else GOOD}"))
