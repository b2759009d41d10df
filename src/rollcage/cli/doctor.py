"""Checks this machine, the agent and the endpoints, and prepares what rollouts need: `doctor` and `setup`."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
from rich.text import Text

from rollcage.assembly import agent, provider
from rollcage.cli import codes
from rollcage.cli.narrator import BAD, DIM, GOOD, STRONG, WARN, Marks, counted
from rollcage.cli.output import environment, program, write_json
from rollcage.cli.request import endpoint_request
from rollcage.cli.screen import Screen, marks_for, screen
from rollcage.cli.text import one_line, seconds_of
from rollcage.endpoints import EndpointRequest, kind_of, resolve
from rollcage.errors import ModelError, RollcageError, SetupError, UsageError
from rollcage.sandboxes.base import run
from rollcage.settings import KINDS, Settings
from rollcage.types import SandboxSpec, Value

ADVISORY = ("cgroup", "disk limit", "inotify", "nsenter", "setpriv")
"""Findings whose names begin so make boxes better; boxes work without."""


class Finding(Value):
    """One thing that was looked at."""

    name: str
    """What it is."""
    ok: bool
    """Whether it is as it should be."""
    needed: bool = True
    """Whether rollouts cannot do without it."""
    detail: str
    """What was found."""
    remedy: str = ""
    """What to do about it, as exactly as we know."""


def doctor(options: Mapping[str, Any], as_json: bool) -> int:
    """`rollcage doctor`."""
    return anyio.run(_doctor, environment(), endpoint_request(options), as_json)


def setup(check: bool, as_json: bool) -> int:
    """`rollcage setup`."""
    return anyio.run(_setup, environment(), check, as_json)


async def _doctor(settings: Settings, request: EndpointRequest, as_json: bool) -> int:
    console = screen(settings)
    found = []
    async for finding in _findings(settings, request):
        found.append(finding)
        if not as_json:
            _tell(console, marks_for(console), finding)
    bad = [finding for finding in found if finding.needed and not finding.ok]
    if as_json:
        write_json({"ready": not bad, "findings": [finding.model_dump(mode="json") for finding in found]})
    else:
        last = f"{counted(len(bad), 'thing')} to fix" if bad else f"ready: {program()} run examples/paginate.toml"
        console.print(Text(last, style=f"{STRONG} {BAD if bad else GOOD}"))
    return codes.NOT_READY if bad else codes.SUCCEEDED


def _tell(console: Screen, marks: Marks, finding: Finding) -> None:
    mark = (f"{marks.good} ", GOOD) if finding.ok else (f"{marks.bad} ", BAD) if finding.needed else ("! ", WARN)
    console.print(
        Text.assemble(mark, (one_line(finding.name), STRONG), (f"  {one_line(finding.detail)}", DIM)), soft_wrap=True
    )
    if finding.remedy:
        console.print(Text(f"    {one_line(finding.remedy)}", style="" if not finding.ok else DIM), soft_wrap=True)


async def _findings(settings: Settings, request: EndpointRequest) -> AsyncIterator[Finding]:
    from rollcage.sandboxes.machine import findings

    barred = False
    for found in await anyio.to_thread.run_sync(findings, settings.home):
        needed = not found.name.startswith(ADVISORY)
        barred = barred or (needed and not found.ok)
        yield Finding(name=found.name, ok=found.ok, needed=needed, detail=found.detail, remedy=found.remedy)
    state = _state(settings)
    yield state
    if state.ok and not barred:
        yield await _box(settings)
    yield await _agent(settings)
    if request.names_something:
        yield await _endpoint(request, settings)
        return
    named = [kind for kind in KINDS if _is_set_up(kind, settings)]
    for kind in named:
        yield await _endpoint(EndpointRequest(endpoint=kind), settings)
    if not named:
        remedy = "set VLLM_URL, or OPENAI_API_KEY, or name one: rollcage doctor --endpoint vllm --base-url http://..."
        yield Finding(name="endpoint", ok=True, detail="none is set up; scripted tasks run without one", remedy=remedy)


def _is_set_up(kind: str, settings: Settings) -> bool:
    told = settings.endpoints[kind]
    # Only the router and OpenAI have an address of their own; there it is the key that makes the difference.
    return bool(told.base_url) or (kind in ("openai", "hf_router") and bool(told.api_key.get_secret_value()))


def _state(settings: Settings) -> Finding:
    try:
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=settings.home) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        stats = os.statvfs(settings.home)
    except OSError as error:
        remedy = "set ROLLCAGE_HOME to a folder you may write to"
        return Finding(name="state", ok=False, detail=f"{settings.home}: {error.strerror}", remedy=remedy)
    free = stats.f_bavail * stats.f_frsize / (1 << 30)
    remedy = "" if free >= 1 else "free some space, or set ROLLCAGE_HOME to a folder on a larger disk"
    return Finding(name="state", ok=free >= 1, detail=f"{settings.home}, {free:.1f} GB free", remedy=remedy)


async def _box(settings: Settings) -> Finding:
    """What a rollout does first, done: each part may work here and a whole box not, as in some containers."""
    try:
        async with provider(settings) as boxes, boxes.open(SandboxSpec()) as box:
            started = time.monotonic()
            tried = await run(box, ["true"])
    except RollcageError as error:
        what, _, remedy = str(error).partition("): ")
        return Finding(name="box", ok=False, detail=f"{what})" if remedy else what, remedy=remedy)
    detail = f"a command ran in one, in {seconds_of(time.monotonic() - started)}"
    return Finding(name="box", ok=tried.code == 0, detail=detail if tried.code == 0 else tried.stderr.text.strip())


async def _agent(settings: Settings) -> Finding:
    try:
        here = agent(settings)
        name = f"{here.name} {here.version}"
        layers = provider(settings).layers
        missing = [layer for layer in here.layers() if not layers.has(layer)]
    except RollcageError as error:
        return Finding(name="agent", ok=False, detail=str(error))
    if missing:
        return Finding(name="agent", ok=False, detail=f"{name} is not prepared", remedy=f"run: {program()} setup")
    return Finding(name="agent", ok=True, detail=f"{name} is prepared")


async def _endpoint(request: EndpointRequest, settings: Settings) -> Finding:
    from rollcage.gateway import Gateway

    try:
        kind = kind_of(request)
        if kind == "scripted":
            return Finding(
                name="endpoint scripted", ok=True, detail="no model: answers come from the task's own script"
            )
        endpoint = resolve(request, settings)
    except UsageError as error:
        what, _, remedy = str(error).partition("; ")
        return Finding(name=f"endpoint {request.endpoint}".strip(), ok=False, detail=what, remedy=remedy)
    started = time.monotonic()
    try:
        with anyio.fail_after(30):
            async with Gateway.open() as gateway:
                await gateway.check(endpoint)
    except TimeoutError:
        problem, remedy = f"{endpoint.base_url} did not answer within 30 s", "see whether its server is up"
    except ModelError as error:
        problem, _, remedy = str(error).partition("; ")
    else:
        took = seconds_of(time.monotonic() - started)
        return Finding(name=f"endpoint {kind}", ok=True, detail=f"{endpoint.model} at {endpoint.base_url} ({took})")
    return Finding(name=f"endpoint {kind}", ok=False, detail=problem, remedy=remedy)


async def _setup(settings: Settings, check: bool, as_json: bool) -> int:
    here, layers = agent(settings), provider(settings).layers
    missing = [layer for layer in here.layers() if not layers.has(layer)]
    if check and missing:
        names = ", ".join(layer.name for layer in missing)
        raise SetupError(f"not prepared yet: {names}; run: {program()} setup")
    started = time.monotonic()
    for layer in missing:
        if not as_json:
            print(f"setup: preparing {layer.name} (once)", file=sys.stderr, flush=True)
        await layers.ensure(layer)
    took = time.monotonic() - started
    if as_json:
        built = [layer.name for layer in missing]
        write_json({"agent": here.name, "version": here.version, "built": built, "seconds": took})
    elif missing:
        print(f"setup: {here.name} {here.version} is ready ({seconds_of(took)})", flush=True)
    return codes.SUCCEEDED
