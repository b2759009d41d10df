"""Who may import whom: edges know the core, the core knows no edge, and nothing heavy comes along uncalled for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
OURS = ("rollcage", "opencode_env", "openenv")
EDGES = ("cli", "server", "client", "__main__")
"""Parts of rollcage that nothing else of it may import."""
BACKEND = re.compile(
    r"rollcage\.(sandboxes\.(local|box|keeper|container|e2b|inside)|agents\.(opencode|shell)|environments\.(fleet|mcp|openenv))"
)
HEAVY = "openenv gradio docker e2b fastapi starlette mcp fastmcp fleet httpx prometheus_client rollcage.server".split()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """Every module it imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:  # others stay in their own package
            # `from rollcage import client` names a module, too.
            yield from {node.module, *(f"{node.module}.{alias.name}" for alias in node.names if node.module in OURS)}


IMPORTS = {module_of(path): set(imported(path)) for path in SOURCE.rglob("*.py")}


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def edges(*importers: str, to: tuple[str, ...], but: tuple[str, ...] = ()) -> list[str]:
    """Imports of `to` in any of these parts of the tree, those in `but` left out."""
    return [
        f"{module} imports {name}"
        for module, names in sorted(IMPORTS.items())
        if below(module, *importers) and not below(module, *but)
        for name in sorted(names)
        if below(name, *to)
    ]


def test_imports_are_found_at_the_top_and_inside_functions() -> None:
    assert edges("rollcage.server", to=("rollcage.runner",)) and edges("rollcage.cli", to=("rollcage.server",))
    assert edges("rollcage.assembly", to=("rollcage.sandboxes.e2b",)), "inside a function"


def test_leaves_import_nothing_of_ours_but_each_other() -> None:
    assert not edges("rollcage.errors", to=OURS)
    assert {name for name in IMPORTS["rollcage.types"] if below(name, *OURS)} <= {"rollcage.errors"}
    assert {name for name in IMPORTS["rollcage.events"] if below(name, *OURS)} <= {"rollcage.types", "rollcage.errors"}


def test_nothing_but_an_edge_imports_an_edge() -> None:
    to = tuple(f"rollcage.{name}" for name in EDGES)
    # The package itself offers its client, and fetches it when it is asked for.
    assert edges("rollcage", to=to, but=to) == ["rollcage imports rollcage.client"]
    assert not edges("rollcage.server", to=("rollcage.cli",))


@pytest.mark.parametrize("client", ["rollcage.client", "opencode_env.client"])
def test_a_client_shares_words_with_the_server_and_knows_nothing_of_it(client: str) -> None:
    assert not edges(client, to=("rollcage.server", "rollcage.cli"))
    assert edges(client, to=("rollcage.api",))


def test_only_the_environment_and_the_published_names_import_openenv() -> None:
    assert not edges("rollcage", to=("openenv",), but=("rollcage.server.environment",))
    assert not edges(
        "rollcage", to=("opencode_env",), but=("rollcage.server.environment", "rollcage.server.openenv_presence")
    )


def test_run_and_runner_know_protocols_and_no_backend() -> None:
    """The parts they are given come from `assembly`, which only edges call."""
    core = ("rollcage.run", "rollcage.runner", "rollcage.verification", "rollcage.staging", "rollcage.scoring")
    backends = tuple(module for module in IMPORTS if BACKEND.match(module))
    assert {"rollcage.sandboxes.local", "rollcage.sandboxes.e2b_box", "rollcage.agents.opencode"} <= set(backends)
    assert not edges(*core, to=(*backends, "rollcage.assembly", "rollcage.settings", "rollcage.testing"))
    assert not edges("rollcage", to=("rollcage.assembly",), but=("rollcage.cli", "rollcage.server"))


def loaded(statement: str) -> set[str]:
    """The modules of a new process after this statement."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(ended.stdout.split())


def test_a_rollout_loads_nothing_that_it_does_not_use() -> None:
    parts = "rollcage.runner, rollcage.assembly, rollcage.store, rollcage.agents.opencode, rollcage.sandboxes.local"
    modules = loaded(f"import {parts}, rollcage.cli.rollouts, rollcage.tasks, rollcage.result")
    assert "rollcage.run" in modules and not modules & set(HEAVY)


def test_the_package_and_its_help_load_next_to_nothing() -> None:
    modules = loaded("import rollcage, rollcage.cli.commands")
    assert "click" in modules and not modules & {*HEAVY, "pydantic", "anyio", "rich", "msgspec"}


def test_the_client_loads_no_web_framework() -> None:
    modules = loaded("from rollcage import Client")
    assert "rollcage.client" in modules and not modules & set(HEAVY) - {"httpx", "rollcage.server"}
