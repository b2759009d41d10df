"""Who may import whom: one table. The core knows no edge, and parts do not know each other's backends."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

SOURCE = ROOT / "src"

LEAVES = "types errors agent_events events results json_safe sse locks asgi evaluation"
TABLE = f"""
errors                 :
types                  : errors
json_safe              :
sse                    :
asgi                   : errors
evaluation             : types
locks                  :
agent_events           : types
events                 : types errors agent_events
results                : events agent_events types errors
settings               : types errors
endpoints              : settings simulators schema types errors

schema                 : {LEAVES}
store                  : {LEAVES}
trajectory             : {LEAVES}
mcp                    : {LEAVES}
simulators             : {LEAVES}
local_model            : {LEAVES}

tasks                  : endpoints {LEAVES}
jobs                   : endpoints settings schema tasks {LEAVES}
gateway                : store {LEAVES}
sandboxes              : sandboxes.inside {LEAVES}
sandboxes.inside       :
sandboxes.images       : sandboxes sandboxes.inside {LEAVES}
sandboxes.local        : sandboxes sandboxes.inside sandboxes.images {LEAVES}
sandboxes.container    : sandboxes sandboxes.inside sandboxes.images {LEAVES}
sandboxes.e2b          : sandboxes sandboxes.inside sandboxes.images settings {LEAVES}
agents                 : sandboxes {LEAVES}
agents.opencode        : agents sandboxes {LEAVES}
agents.loop            : agents sandboxes mcp {LEAVES}
agents.shell           : agents sandboxes {LEAVES}
agents.mini            : agents sandboxes {LEAVES}
agents.mini.inside     :
agents.mini_swe_agent  : agents sandboxes {LEAVES}
agents.mini_swe_agent.inside :
agents.catalog         : agents agents.opencode agents.mini_swe_agent sandboxes {LEAVES}
environments           : mcp sandboxes {LEAVES}
environments.mcp       : environments mcp {LEAVES}
environments.openenv   : environments mcp {LEAVES}
environments.fleet     : environments mcp settings {LEAVES}

rollout                : agents sandboxes gateway environments tasks {LEAVES}
runner                 : rollout simulators store trajectory schema agents sandboxes gateway environments {LEAVES}
conformance.sandboxes  : sandboxes sandboxes.local sandboxes.container sandboxes.e2b {LEAVES}
conformance.agents     : agents sandboxes conformance.sandboxes gateway rollout environments mcp simulators {LEAVES}
otel                   : settings store {LEAVES}
wiring                 : *
api                    : *
trl                    : *
verl                   : *
cluster                : *
client                 : schema trajectory {LEAVES}
cli                    : *
server                 : *
rollcage               : *
opencode_env           : *
examples               : *
"""
"""A room, and what it may import beside itself. `*`: an edge, which builds parts and may know all of them.

A line for a part of a room (`sandboxes.local`) takes it out of the room's own line.
"""

ALLOWED = {
    room.strip(): names.split() for room, _, names in (line.partition(":") for line in TABLE.split("\n") if line)
}
EDGES = {
    "api",
    "cli",
    "client",
    "cluster",
    "examples",
    "opencode_env",
    "server",
    "trl",
    "verl",
    "wiring",
}
"""Nothing but an edge, or the package's own face, imports one of these."""
HEAVY = (
    "opentelemetry openenv ray gradio docker e2b fastapi starlette mcp fastmcp fleet httpx prometheus_client "
    "rollcage.server"
).split()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported(text: str, modules: frozenset[str]) -> Iterator[str]:
    """Every module it imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:  # `from rollcage import client` names a module, too
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else node.module


PATHS = {module_of(path): path for path in SOURCE.rglob("*.py")}
MODULES = frozenset(PATHS)
IMPORTS = {module: set(imported(path.read_text(), MODULES)) for module, path in PATHS.items()}


def room_of(module: str) -> str:
    """The row of the table that a module falls under."""
    parts = module.split(".")
    if parts[0] != "rollcage":
        return parts[0]
    if len(parts) == 1 or parts[1] == "__main__":
        return "rollcage"
    inner = ".".join(parts[1:3])
    return inner if inner in ALLOWED else parts[1]


def strays(imports: dict[str, set[str]]) -> list[str]:
    """Imports that the table does not have."""
    found = []
    for module, names in sorted(imports.items()):
        room = room_of(module)
        for name in sorted(names):
            other = room_of(name)
            if name.split(".")[0] not in ("rollcage", "opencode_env") or other == room:
                continue
            if room not in ALLOWED:
                found.append(f"{module}: no row for {room}")
            elif "*" not in ALLOWED[room] and other not in ALLOWED[room]:
                found.append(f"{module} imports {name}")
            elif other in EDGES and room not in EDGES | {"rollcage"}:
                found.append(f"{module} imports the edge {name}")
            elif other == "opencode_env":
                found.append(f"{module} imports the published names, which stand on it")
    return found


def test_every_import_is_one_the_table_has() -> None:
    assert strays(IMPORTS) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("rollcage.rollout.run", "from rollcage.sandboxes.local.provider import LocalProvider"),
        ("rollcage.types", "from rollcage import events"),
        ("rollcage.gateway.lease", "def f() -> None:\n    import rollcage.settings"),
        ("rollcage.schema.request", "from rollcage.store import Store"),
        ("rollcage.sandboxes.e2b.box", "from rollcage.sandboxes.local import box"),
        ("rollcage.runner.runner", "import rollcage.server.service"),
        ("rollcage.server.app", "import opencode_env"),
    ],
)
def test_an_import_against_the_table_is_found(module: str, line: str) -> None:
    assert strays({module: set(imported(line, MODULES))})


@pytest.mark.parametrize("room", [room_of, lambda module: room_of(module).split(".")[0]], ids=["rooms", "packages"])
def test_no_two_rooms_import_each_other(room: Callable[[str], str]) -> None:
    edges: dict[str, set[str]] = {}
    for module, names in IMPORTS.items():
        for name in names & MODULES:
            if room(name) != room(module):
                edges.setdefault(room(module), set()).add(room(name))
    # The package's face fetches what it offers when it is asked for; nobody imports the face itself.
    edges.pop("rollcage", None)
    assert not [(one, other) for one, others in edges.items() for other in others if _leads_to(edges, other, one)]


def _leads_to(edges: dict[str, set[str]], start: str, goal: str) -> bool:
    seen, waiting = set(), [start]
    while waiting:
        room = waiting.pop()
        if room == goal:
            return True
        if room not in seen:
            seen.add(room)
            waiting += edges.get(room, ())
    return False


def test_only_settings_reads_the_environment() -> None:
    readers = {
        module
        for module, path in PATHS.items()
        if ".inside." not in module  # a program in a box: its environment is what we gave it
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"rollcage.settings", *EDGE_READERS}


EDGE_READERS = {
    "rollcage.cli",
    "rollcage.conformance.sandboxes.isolation",
    "rollcage.examples.fleet_env_example",
    "rollcage.examples.grpo.engine",
    "rollcage.examples.grpo.train",
}
"""Completion by click; the check that no variable of ours is seen in a box; examples for copying."""


def loaded(statement: str) -> set[str]:
    """The modules of a new process after this statement."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(ended.stdout.split())


def test_a_rollout_loads_nothing_that_it_does_not_use() -> None:
    parts = (
        "rollcage.runner, rollcage.wiring, rollcage.store, rollcage.agents.opencode, rollcage.sandboxes.local.provider"
    )
    modules = loaded(f"import {parts}, rollcage.tasks, rollcage.results.result")
    assert "rollcage.rollout.run" in modules and not modules & set(HEAVY)


def test_the_package_and_its_help_load_next_to_nothing() -> None:
    modules = loaded("import rollcage, rollcage.cli")
    assert "click" in modules and not modules & {*HEAVY, "pydantic", "anyio", "rich", "msgspec"}


def test_the_client_loads_no_web_framework_and_no_log() -> None:
    modules = loaded("from rollcage import Client") - loaded("import httpx")  # httpx itself looks for zstandard
    assert "rollcage.schema.request" in modules and not modules & set(HEAVY)
    assert not modules & {"sqlite3", "zstandard", "msgspec", "rollcage.store", "rollcage.settings"}


PUBLISHED = {"CommandResult", "OpenCodeEnvironment", "RolloutArguments", "RolloutResult"}
"""Names of the published package that ours have too: code that was written for it asks for them."""


def test_one_name_is_one_class() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in PATHS.items():
        if not module.startswith("rollcage.examples."):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1 and name not in PUBLISHED} == {}


def test_the_page_about_the_house_names_what_is_there_and_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = [str(path) for folder in (SOURCE, ROOT / "tests") for path in folder.rglob("*.py")]
    named = set(re.findall(r"[\w/]+\.py\b", page))
    assert "rollout/run.py" in named
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()
    rooms = {path.name for path in (SOURCE / "rollcage").iterdir() if (path / "__init__.py").is_file()}
    assert "rollout" in rooms and {room for room in rooms if f"  {room}/" not in page} == set()
