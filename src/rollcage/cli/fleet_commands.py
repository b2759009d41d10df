"""Carries out `rollcage fleet ls, run, tools, call`: each provisions at most one instance and releases it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
from anyio.abc import TaskStatus
from rich.table import Table
from rich.text import Text

import rollcage.fleet
from rollcage.cli import codes
from rollcage.cli.output import environment, write_json
from rollcage.cli.screen import screen
from rollcage.cli.text import clean, one_line, seconds_of
from rollcage.errors import UsageError
from rollcage.fleet import ListToolsAction, RemoteEnvironment, ToolsReport, guarded, sdk
from rollcage.settings import Settings


def ls(instances: bool, as_json: bool) -> int:
    """`rollcage fleet ls`."""
    return anyio.run(_ls, environment(), instances, as_json)


async def _ls(settings: Settings, instances: bool, as_json: bool) -> int:
    async with guarded.client(timeout=30) as http:
        client = sdk.fleet(settings.fleet.api_key, settings.fleet.base_url, http)
        if instances:
            rows = [
                {"instance_id": one.instance_id, "env_key": one.env_key, "version": one.version, "status": one.status}
                for one in await sdk.instances(client)
            ]
        else:
            rows = [
                {"key": one.key, "version": one.default_version, "description": one.description}
                for one in await sdk.environments(client)
            ]
    if as_json:
        write_json(rows)
    elif rows:
        screen(settings).put([_table(list(rows[0]), [list(row.values()) for row in rows])])
    else:
        screen(settings).print("nothing runs" if instances else "this key may use no environment")
    return codes.SUCCEEDED


def run(env_key: str, seed: int | None, given: dict[str, Any], as_json: bool) -> int:
    """`rollcage fleet run`."""
    settings = environment()

    async def work() -> int:
        async with _open(settings, env_key, given) as env:
            reset = await env.reset(seed)
            listed = await env.tools.list_tools()
            report = env.tools.report()
        if as_json:
            found = {"key": env.key, "instance_id": env.instance_id, "reset": reset.message, "released": True}
            write_json({**found, "tools": listed.names, "report": _plain(report)})
        else:
            console = screen(settings)
            console.print(f"provisioned  {one_line(env.key, 90)}, instance {one_line(env.instance_id, 90)}")
            console.print(f"reset        {one_line(reset.message, 90) or 'done'}")
            console.put(_plane(listed, report))
            console.print("released")
        return codes.SUCCEEDED

    return anyio.run(_heeding, work)


def tools(env_key: str, given: dict[str, Any], as_json: bool) -> int:
    """`rollcage fleet tools`."""
    settings = environment()

    async def work() -> int:
        async with _open(settings, env_key, given) as env:
            listed = await env.tools.list_tools()
            report = env.tools.report()
        if as_json:
            raw = {tool.name: {"endpoint": tool.endpoint, "tool": tool.raw} for tool in listed.offered}
            write_json({"tools": listed.tools, "raw": raw, "report": _plain(report)})
        else:
            screen(settings).put([*_plane(listed, report), Text(""), *_details(listed)])
        return codes.SUCCEEDED

    return anyio.run(_heeding, work)


def call(env_key: str, what: tuple[str, str], seed: int | None, given: dict[str, Any], as_json: bool) -> int:
    """`rollcage fleet call`."""
    settings = environment()
    tool, arguments = what[0], arguments_of(what[1])

    async def work() -> int:
        async with _open(settings, env_key, given) as env:
            if seed is not None:
                await env.reset(seed)
            result = await env.tools.call_tool(tool, arguments)
        if as_json:
            write_json(result)
        else:
            # To a person, and to whatever reads stdout: the answer alone.
            screen(settings).out(clean(result.text), highlight=False)
            where = f"{result.tool} on {result.endpoint}, {seconds_of(result.seconds)}; {env.instance_id} released"
            print(f"rollcage: {one_line(where, 200)}", file=sys.stderr)
        return codes.SUCCEEDED

    return anyio.run(_heeding, work)


async def _heeding(work: Callable[[], Awaitable[int]]) -> int:
    """Do it. Signals that ask us to end cut it short, so that what was provisioned is released; Ctrl-C does anyway."""
    heard: list[int] = []
    code = codes.OTHER

    async def listen(*, task_status: TaskStatus[None]) -> None:
        # What our parent chose to ignore (nohup) stays ignored.
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        with anyio.open_signal_receiver(*numbers) as signals:
            task_status.started()
            async for number in signals:
                heard.append(number)
                scope.cancel()

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            await tasks.start(listen)
            code = await work()
            tasks.cancel_scope.cancel()
    return 128 + heard[0] if heard else code


def arguments_of(text: str) -> dict[str, Any]:
    """The JSON object that was typed, or that stdin holds."""
    try:
        arguments = json.loads(sys.stdin.read() if text == "-" else text)
    except ValueError as error:
        raise UsageError(f"ARGS: this is no JSON ({error}); an object is needed, such as '{{\"limit\": 3}}'") from error
    if not isinstance(arguments, dict):
        raise UsageError("ARGS: a JSON object is needed, such as '{\"limit\": 3}'")
    return arguments


def _open(settings: Settings, env_key: str, given: dict[str, Any]) -> AbstractAsyncContextManager[RemoteEnvironment]:
    options = {name: value for name, value in given.items() if value is not None and value != ()}
    if "endpoints" in options:
        options["endpoints"] = dict(_endpoint(text) for text in options["endpoints"])
    said = settings.fleet
    return rollcage.fleet.open(env_key, api_key=said.api_key, **{"base_url": said.base_url, **options})


def _endpoint(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    if not found or not name or "/" in name:
        raise UsageError(f"--endpoint: {text!r} is not NAME=URL")
    return name, url


def _plane(listed: ListToolsAction, report: ToolsReport) -> Iterable[Table | Text]:
    """Endpoint by endpoint: how it is, and what it offers."""
    rows = []
    for endpoint in report.endpoints:
        names = [tool.name for tool in listed.offered if tool.endpoint == endpoint.name]
        rows.append([endpoint.name, endpoint.status, ", ".join(names) or one_line(endpoint.error, 70)])
    yield _table(["endpoint", "status", "tools"], rows)
    for conflict in report.conflicts:
        others = ", ".join(f"{name} ({'as ' + to if to else 'not offered'})" for name, to in conflict.others.items())
        yield Text(f"{conflict.name}: served by {conflict.winner}; also on {others}")
    for name in report.withheld:
        yield Text(f"withheld: {name} (the name belongs to the HTTP plane)")


def _details(listed: ListToolsAction) -> Iterable[Text]:
    for tool in listed.offered:
        yield Text(f"{tool.name}: {one_line(str(tool.raw.get('description') or 'no description'), 100)}", style="bold")
        required, properties = tool.input_schema.get("required"), tool.input_schema.get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            # `true` and `false` are schemas, too.
            shown = {k: v for k, v in schema.items() if k != "title"} if isinstance(schema, dict) else schema
            needed = isinstance(required, list) and name in required
            kind = one_line(json.dumps(shown), 90)
            yield Text(f"  {one_line(name, 60)}{'' if needed else ' (optional)'}: {kind}")


def _table(titles: list[str], rows: list[list[Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(str(cell), 300)) for cell in row))
    return table


def _plain(report: ToolsReport) -> dict[str, Any]:
    return {"status": report.status, **report.model_dump(mode="json")}
