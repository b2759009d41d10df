"""The tools of a remote environment as tables and lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

from rollcage.cli.text import one_line
from rollcage.environments.fleet import ListToolsAction, ToolsReport


def plane(listed: ListToolsAction, report: ToolsReport) -> Iterable[Table | Text]:
    """Endpoint by endpoint: its status, and what it offers."""
    rows = []
    for endpoint in report.endpoints:
        names = [tool.name for tool in listed.offered if tool.endpoint == endpoint.name]
        rows.append([endpoint.name, endpoint.status, ", ".join(names) or one_line(endpoint.error, 70)])
    yield table_of(["endpoint", "status", "tools"], rows)
    for conflict in report.conflicts:
        others = ", ".join(f"{name} ({'as ' + to if to else 'not offered'})" for name, to in conflict.others.items())
        yield Text(f"{conflict.name}: served by {conflict.winner}; also on {others}")
    for name in report.withheld:
        yield Text(f"withheld: {name} (the name belongs to the HTTP plane)")


def details(listed: ListToolsAction) -> Iterable[Text]:
    """Tool by tool: what it does, and its arguments."""
    for tool in listed.offered:
        yield Text(f"{tool.name}: {one_line(str(tool.raw.get('description') or 'no description'), 100)}", style="bold")
        required, properties = tool.input_schema.get("required"), tool.input_schema.get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            # `true` and `false` are schemas, too.
            shown = {k: v for k, v in schema.items() if k != "title"} if isinstance(schema, dict) else schema
            needed = isinstance(required, list) and name in required
            kind = one_line(json.dumps(shown), 90)
            yield Text(f"  {one_line(name, 60)}{'' if needed else ' (optional)'}: {kind}")


def table_of(titles: list[str], rows: list[list[Any]]) -> Table:
    """A table without lines."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(str(cell), 300)) for cell in row))
    return table


def plain(report: ToolsReport) -> dict[str, Any]:
    """The report for programs."""
    return {"status": report.status, **report.model_dump(mode="json")}
