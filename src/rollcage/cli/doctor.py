"""`rollcage doctor` and `setup`: is this machine ready, and make it so. Heavy parts are imported when used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from rollcage.cli import codes
from rollcage.cli.codes import HELP
from rollcage.cli.options import JSON, Derived
from rollcage.errors import SetupError

if TYPE_CHECKING:
    from rollcage.cli.findings import Finding
    from rollcage.cli.screen import Screen
    from rollcage.endpoints import EndpointRequest
    from rollcage.settings import Settings


@click.command(epilog=HELP, cls=Derived, made_by="model_options")
@click.option("--repair", is_flag=True, help="Save what is readable of a damaged log, and do nothing else.")
@JSON
def doctor(as_json: bool, repair: bool, **options: Any) -> int:
    """Check this machine and an endpoint; print what to fix.

    Without an endpoint option, every endpoint that the environment's variables name is asked. --repair puts a log of
    all that is readable in the place of a damaged one, which is kept beside it.

    \b
    Examples:
      rollcage doctor
      rollcage doctor --endpoint vllm --base-url http://gpu:8000 --json
      rollcage doctor --repair
    """
    if repair:
        return _repair(as_json)
    import anyio

    from rollcage.cli.output import environment
    from rollcage.cli.request import in_one_word
    from rollcage.jobs import endpoint_request

    return anyio.run(_doctor, environment(), endpoint_request({**options, **in_one_word(options)}), as_json)


@click.command()
@click.option("--check", is_flag=True, help="Only look whether it was done; exit code 3 where it was not.")
@click.option("--base", is_flag=True, help="Make the base system too: boxes that are the same on every machine.")
@JSON
def setup(check: bool, base: bool, as_json: bool) -> int:
    """Fetch the agent and build its base layer, once.

    The next time there is nothing to do. With --base, a Debian system for boxes is made of this machine's package
    sources, as any user; made again only where packages have changed. It is then the system of every rollout that names
    no other.

    \b
    Examples:
      rollcage setup
      rollcage setup --base
      rollcage setup --check && echo ready
    """
    import anyio

    from rollcage.cli.output import environment

    return anyio.run(_setup, environment(), check, base, as_json)


def _repair(as_json: bool) -> int:
    from rollcage.cli.narrator import counted
    from rollcage.cli.output import environment, write_json
    from rollcage.locks import is_claimed
    from rollcage.store.repair import repair

    settings = environment()
    if not settings.log_path.exists():
        raise SetupError(f"there is no {settings.log_path}", remedy="nothing is to repair")
    owners = settings.home / "owners"
    if owners.is_dir() and any(is_claimed(path) for path in owners.iterdir()):
        raise SetupError(f"{settings.log_path} is in use", remedy="stop the servers and rollouts that write to it")
    done = repair(settings.log_path)
    if as_json:
        write_json(done)
    else:
        print(
            f"{counted(done.rollouts, 'rollout')} whole, {len(done.cut)} cut where they could not be read, "
            f"{len(done.lost)} lost; the damaged log is {done.damaged}"
        )
    return codes.OK


async def _doctor(settings: Settings, request: EndpointRequest, as_json: bool) -> int:
    from rich.text import Text

    from rollcage.cli.findings import findings
    from rollcage.cli.narrator import BAD, GOOD, STRONG, counted
    from rollcage.cli.output import program, write_json
    from rollcage.cli.screen import screen

    console = screen(settings)
    found = []
    async for finding in findings(settings, request):
        found.append(finding)
        if not as_json:
            _print_finding(console, finding)
    bad = [finding for finding in found if finding.needed and not finding.ok]
    if as_json:
        write_json({"ready": not bad, "findings": [finding.model_dump(mode="json") for finding in found]})
    else:
        last = f"{counted(len(bad), 'thing')} to fix" if bad else f"ready: {program()} demo"
        console.print(Text(last, style=f"{STRONG} {BAD if bad else GOOD}"))
    return codes.NOT_READY if bad else codes.OK


def _print_finding(console: Screen, finding: Finding) -> None:
    from rich.text import Text

    from rollcage.cli.narrator import BAD, DIM, GOOD, STRONG, WARN
    from rollcage.cli.screen import marks_for
    from rollcage.cli.text import one_line

    marks = marks_for(console)
    mark = (f"{marks.good} ", GOOD) if finding.ok else (f"{marks.bad} ", BAD) if finding.needed else ("! ", WARN)
    console.print(
        Text.assemble(mark, (one_line(finding.name), STRONG), (f"  {one_line(finding.detail)}", DIM)), soft_wrap=True
    )
    if finding.remedy:
        console.print(Text(f"    {one_line(finding.remedy)}", style="" if not finding.ok else DIM), soft_wrap=True)


async def _setup(settings: Settings, check: bool, base: bool, as_json: bool) -> int:
    from rollcage.cli.output import program, write_json
    from rollcage.cli.prepare import missing_layers, prepare, prepare_base
    from rollcage.types import BASE
    from rollcage.wiring import agent, provider

    missing = [layer.name for layer in missing_layers(settings)] if check else []
    if check and base and not provider(settings).images.has(BASE):
        missing.append(BASE)
    if missing:
        more = " --base" if BASE in missing else ""
        raise SetupError(f"not prepared yet: {', '.join(missing)}", remedy=f"run: {program()} setup{more}")
    started = time.monotonic()
    names = [] if check else [layer.name for layer in await prepare(settings)]
    if base and not check and await prepare_base(settings):
        names.append(BASE)
    if as_json:
        here, took = agent(settings), time.monotonic() - started
        write_json({"agent": here.name, "version": here.version, "built": names, "seconds": took})
    return codes.OK
