"""What `rollcage doctor` looks at: this machine, the state folder, a box, the agent, the endpoints."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec

import anyio

from rollcage.cli.output import program
from rollcage.cli.prepare import describe, missing_layers
from rollcage.cli.request import as_option
from rollcage.cli.text import seconds_of
from rollcage.endpoints import EndpointRequest, kind_of, resolve
from rollcage.errors import ModelError, RollcageError, UsageError
from rollcage.sandboxes.base import Sandbox, run
from rollcage.sandboxes.images.base import COMMANDS
from rollcage.settings import KINDS, Settings
from rollcage.types import BASE, SandboxSpec, Value
from rollcage.wiring import agent, provider, system_of

ADVISORY = ("cgroup", "disk limit", "inotify", "judge and judged", "nsenter", "setpriv")
"""Findings whose names begin with this make boxes better; boxes work without."""


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


async def findings(settings: Settings, request: EndpointRequest) -> AsyncIterator[Finding]:
    """Everything that was looked at, one after the other; endpoints come last."""
    from rollcage.sandboxes.local import machine

    barred = False
    for found in await anyio.to_thread.run_sync(machine.findings, settings.home):
        needed = not found.name.startswith(ADVISORY)
        barred = barred or (needed and not found.ok)
        yield Finding(name=found.name, ok=found.ok, needed=needed, detail=found.detail, remedy=found.remedy)
    state = _state(settings)
    yield state
    if settings.log_path.exists():
        yield await anyio.to_thread.run_sync(_log, settings)
    if state.ok and not barred:
        async for finding in _box(settings):
            yield finding
    async for finding in _engine(settings):
        yield finding
    yield await _agent(settings)
    yield _other_agents(settings)
    yield image_builder()
    yield _server()
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
    known = settings.endpoints[kind]
    # Only the router and OpenAI have an address of their own; there it is the key that makes the difference.
    return bool(known.base_url) or (kind in ("openai", "hf_router") and bool(known.api_key.get_secret_value()))


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


def _log(settings: Settings) -> Finding:
    """What the log takes, and whether it is whole."""
    from rollcage.cli.log import size_text
    from rollcage.store.repair import check_whole
    from rollcage.store.retention import size_of

    try:
        check_whole(settings.log_path)
        found = size_of(settings.log_path, settings.work_dir)
    except RollcageError as error:
        return Finding(name="log", ok=False, detail=error.message, remedy=error.remedy)
    detail = f"{size_text(found.bytes)}, {found.rollouts} rollouts; kept work: {size_text(found.work_bytes)}"
    remedy = (
        f"{program()} vacuum gives {size_text(found.free_bytes)} back" if found.free_bytes > found.bytes / 4 else ""
    )
    return Finding(name="log", ok=True, needed=False, detail=detail, remedy=remedy)


async def _box(settings: Settings) -> AsyncIterator[Finding]:
    """What a rollout does first, done: each part may work here and a whole box not, as in some containers.

    Then what the system in it lacks.
    """
    try:
        async with provider(settings) as boxes:
            system = system_of(settings, boxes.images)
            if system == BASE and not boxes.images.has(BASE):
                system, remedy = "host", f"the first rollout makes it; now: {program()} setup --base"
                yield Finding(name="system", ok=True, needed=False, detail="base, which is not made yet", remedy=remedy)
            async with boxes.open(SandboxSpec(system=system)) as box:
                started = time.monotonic()
                tried = await run(box, ["true"])
                took = seconds_of(time.monotonic() - started)
                lacking = await _lacking(box)
                source = boxes.images.get(BASE).source if system == BASE else "this machine's own programs"
    except RollcageError as error:
        yield Finding(name="box", ok=False, detail=error.message, remedy=error.remedy)
        return
    detail = f"a command ran in one, in {took}"
    yield Finding(name="box", ok=tried.code == 0, detail=detail if tried.code == 0 else tried.stderr.text.strip())
    detail = f"{system} ({source})" + (f"; it lacks {', '.join(lacking)}" if lacking else "")
    remedy = f"tasks that call them fail; make a system that has them: {program()} setup --base" if lacking else ""
    yield Finding(name="system", ok=not lacking, needed=False, detail=detail, remedy=remedy)


async def _engine(settings: Settings) -> AsyncIterator[Finding]:
    """Whether `--sandbox container` would work; nothing where no engine answers, which most machines lack."""
    from rollcage.sandboxes.container.engine import ContainerEngine

    try:
        engine = await ContainerEngine.open(settings.engines)
    except RollcageError:
        return
    try:
        await engine.check_runtime()
        yield Finding(name="container engine", ok=True, needed=False, detail=f"{engine.address} starts containers")
    except RollcageError as error:
        yield Finding(name="container engine", ok=False, needed=False, detail=error.message, remedy=error.remedy)
    finally:
        engine.close()


async def _lacking(box: Sandbox) -> list[str]:
    """The commands that tasks call by name and that are not in the box."""
    look = 'for name; do command -v -- "$name" >/dev/null || echo "$name"; done'
    return (await run(box, ["sh", "-c", look, "look", *COMMANDS])).stdout.text.split()


async def _agent(settings: Settings) -> Finding:
    try:
        here, missing = agent(settings), missing_layers(settings)
        name = f"{here.name} {here.version}"
    except RollcageError as error:
        return Finding(name="agent", ok=False, detail=error.message, remedy=error.remedy)
    if missing:
        return Finding(name="agent", ok=False, detail=f"{name} is not prepared", remedy=f"run: {program()} setup")
    return Finding(name="agent", ok=True, detail=f"{name} is prepared")


def _other_agents(settings: Settings) -> Finding:
    """Which of the others are here; each is fetched when it is first used."""
    rows = [row for row in describe(settings) if row["installed"] is not None and row["name"] != "opencode"]
    here = [f"{row['name']} {row['version']}" for row in rows if row["installed"]]
    missing = [str(row["name"]) for row in rows if not row["installed"]]
    detail = f"installed: {', '.join(here) or 'none'}; not yet: {', '.join(missing) or 'none'}"
    remedy = f"fetched when first used; now: {program()} agent install {missing[0]}" if missing else ""
    return Finding(name="other agents", ok=True, needed=False, detail=detail, remedy=remedy)


def image_builder() -> Finding:
    """Who builds the Dockerfiles of task folders."""
    import os
    import shutil

    from rollcage.sandboxes.images.builders import find_builder, remedy

    found = find_builder()
    if found.tool is None:
        detail = f"none works, so images of Dockerfiles cannot be built here ({found.why})"
        return Finding(name="image builder", ok=True, needed=False, detail=detail, remedy=remedy(found))
    passed = f"; {found.why}" if found.others else ""
    detail = f"{shutil.which(found.tool.name)}{', rootless' if os.geteuid() else ''}{passed}"
    return Finding(name="image builder", ok=True, needed=False, detail=detail)


def _server() -> Finding:
    """What `rollcage serve` would offer; rollouts need none of it."""
    if not find_spec("fastapi"):
        detail, remedy = "rollcage serve is not installed", "pip install 'rollcage[server]'"
    elif not find_spec("openenv"):
        detail, remedy = "serves HTTP and MCP, without OpenEnv's routes", "pip install 'rollcage[openenv]' adds them"
    else:
        detail, remedy = "serves HTTP, MCP and OpenEnv", ""
    return Finding(name="server", ok=True, detail=detail, remedy=remedy)


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
        what, remedy = error.parts(as_option)
        return Finding(name=f"endpoint {request.endpoint}".strip(), ok=False, detail=what, remedy=remedy)
    started = time.monotonic()
    try:
        with anyio.fail_after(30):
            async with Gateway.open(proxies=settings.proxies) as gateway:
                await gateway.check(endpoint)
    except TimeoutError:
        problem, remedy = f"{endpoint.base_url} did not answer within 30 s", "see whether its server is up"
    except ModelError as error:
        problem, remedy = error.parts(as_option)
    else:
        took = seconds_of(time.monotonic() - started)
        return Finding(name=f"endpoint {kind}", ok=True, detail=f"{endpoint.model} at {endpoint.base_url} ({took})")
    return Finding(name=f"endpoint {kind}", ok=False, detail=problem, remedy=remedy)
