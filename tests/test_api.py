"""The public face: names that cost nothing until they are used, and one call that is one rollout."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollcage
from rollcage.runner.groups import Groups
from rollcage.schema.groups import Group
from rollcage.store import Store

EXAMPLE = Path(__file__).parents[1] / "examples" / "paginate.toml"
HEAVY = {
    *("anyio", "asyncio", "click", "fastapi", "httpx", "msgspec", "pydantic", "rich", "sqlite3", "uvicorn", "uvloop"),
    *(
        "zstandard",
        "openenv",
        "ray",
        "torch",
        "docker",
        "e2b",
        "fleet",
        "mcp",
        "importlib.metadata",
        "typing_extensions",
    ),
}


@pytest.fixture
def settings(state_dir: Path, tmp_path: Path) -> rollcage.Settings:
    """A log of one's own, beside the machine's layers and downloads."""
    for shared in ("cache", "layers"):
        (state_dir / shared).mkdir(parents=True, exist_ok=True)
        (tmp_path / shared).symlink_to(state_dir / shared)
    return rollcage.Settings(home=tmp_path)


def modules_after(statement: str) -> set[str]:
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*(set(sys.modules) - before))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_next_to_nothing() -> None:
    modules = modules_after("import rollcage, sys; dir(rollcage)")
    assert "rollcage" in modules and not modules & HEAVY
    assert len(modules) <= 3, modules


def test_collecting_tests_loads_only_what_they_use() -> None:
    """Every process that runs tests collects them first."""
    here = Path(__file__).parent
    collect = f"pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', {str(here / 'test_settings.py')!r}])"
    code = f"import contextlib, io, pytest\nwith contextlib.redirect_stdout(io.StringIO()):\n    {collect}"
    modules = modules_after(code)
    assert "rollcage.settings" in modules
    assert not modules & {"hypothesis", "schemathesis", "rollcage.gateway", "rollcage.store", "rollcage.runner"}


def test_every_public_name_is_there_and_type_checkers_see_the_same_ones() -> None:
    tree = ast.parse(Path(rollcage.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {node.names[0].name for node in block.body if isinstance(node, ast.ImportFrom)}
    assert {*seen, "__version__"} == set(rollcage.__all__) == set(dir(rollcage))
    assert all(getattr(rollcage, name) is not None for name in rollcage.__all__)
    assert rollcage.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = rollcage.nothing_like_it  # type: ignore[attr-defined]


def test_tasks_are_loaded_by_the_name_that_docs_give() -> None:
    code = f"import rollcage; print(rollcage.tasks.load({str(EXAMPLE)!r}).task.id)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == rollcage.load(EXAMPLE).task.id


def test_the_page_about_python_names_every_public_name() -> None:
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
    assert [name for name in rollcage.__all__ if f"`{name}" not in page and f"rollcage.{name}" not in page] == []


def test_one_call_is_one_rollout(settings: rollcage.Settings) -> None:
    rollout = rollcage.run(
        "echo hello > said.txt",
        agent="shell",
        verify=["test -s said.txt", "false"],
        endpoint="scripted",
        settings=settings,
    )
    assert (rollout.reward, rollout.reward_parts, rollout.outcome) == (0.5, {}, rollout.outcome)
    assert rollout.outcome is not None and rollout.outcome.scored and rollout.files == {"said.txt": "hello\n"}

    async def kept() -> str:
        async with rollcage.Store.open(settings.log_path) as store:
            return (await store.rollout(rollout.id)).id

    assert asyncio.run(kept()) == rollout.id


async def test_it_works_where_a_loop_is_running(settings: rollcage.Settings) -> None:
    """As in a notebook; a real agent, and the file's own script."""
    rollout = rollcage.run(str(EXAMPLE), settings=settings)
    assert rollout.reward == 1.0
    assert rollout.turns[0].tokens[0].id is not None


async def test_an_error_in_a_running_loop_is_the_callers_own(settings: rollcage.Settings) -> None:
    with pytest.raises(rollcage.UsageError, match="agent: no 'nobody' here"):
        rollcage.run("true", agent="nobody", endpoint="scripted", settings=settings)


async def test_many_share_a_runner_and_what_is_given_wins_over_the_task(settings: rollcage.Settings) -> None:
    task = rollcage.Task(id="own", instruction="echo one > a", verify=("test -f a",), keep=("/home/user/kept",))
    async with rollcage.open_runner(settings=settings, at_once=2) as runner:
        both = await asyncio.gather(
            *(
                rollcage.arun(
                    task, agent="shell", endpoint="scripted", task_id=name, max_turns=3, verify=["false"], runner=runner
                )
                for name in ("x", "y")
            )
        )
    assert [rollout.job.task.id for rollout in both] == ["x", "y"]
    assert {rollout.reward for rollout in both} == {0.5}, "their own command, then the one that was given"
    assert both[0].job.task.keep == task.keep and both[0].job.task.limits.max_turns == 3


async def test_a_file_keeps_what_it_says_beside_the_task(settings: rollcage.Settings, tmp_path: Path) -> None:
    path = tmp_path / "task.toml"
    path.write_text('instruction = "true"\nendpoint = "scripted"\n[agent]\nname = "shell"\n[sandbox]\npids = 99\n')
    for work in (path, str(path), rollcage.load(path)):
        rollout = await rollcage.arun(work, settings=settings)
        assert (rollout.job.agent.name, rollout.job.sandbox.pids, rollout.job.model.kind) == ("shell", 99, "scripted")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"verfy": ["true"]}, "did you mean 'verify'"),
        ({"max_turns": -1}, "max_turns"),
        ({"endpoint": "vlm"}, "did you mean 'vllm'"),
        ({}, "no model endpoint"),
        ({"endpoint": "scripted", "idempotency_key": "k"}, "idempotency_key"),
    ],
)
async def test_what_makes_no_sense_is_said_before_anything_is_written(
    settings: rollcage.Settings, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(rollcage.UsageError, match=says):
        await rollcage.arun("true", settings=settings, **arguments)
    assert not settings.log_path.exists()


async def test_a_task_file_that_is_not_there_is_no_instruction(settings: rollcage.Settings) -> None:
    with pytest.raises(rollcage.UsageError, match="no such file"):
        await rollcage.arun("nowhere/task.toml", endpoint="scripted", settings=settings)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs, "nothing that could carry what an agent said"
        self.seen.add(tag)


async def test_a_rollout_shows_itself_safely(settings: rollcage.Settings) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    solution: list[dict[str, Any]] = [
        {"text": evil, "tool_calls": [{"name": f"bash{evil}", "arguments": {"command": evil}}]},
        {"text": "x" * 9000},
    ]
    rollout = await rollcage.arun("Say it.", endpoint="scripted", solution=solution, task_id=evil, settings=settings)
    assert len(rollout.turns) >= 2
    page, tags = rollout._repr_html_(), Tags()
    tags.feed(page)
    assert tags.seen <= {"div", "table", "tr", "th", "td", "details", "summary", "pre", "p"}
    assert "&lt;script&gt;" in page and len(page) < 20_000
    assert repr(rollout).startswith(f"<Rollout {rollout.id} ") and len(repr(rollout)) < 120
    as_json = json.loads(json.dumps(rollout.to_dict()))
    assert (as_json["rollout_id"], as_json["reward"], as_json["task_id"]) == (rollout.id, None, evil)
    assert len(as_json["proxy_turns"]) == len(rollout.turns)


async def test_a_call_that_is_cancelled_while_its_rollouts_begin_leaves_none_of_them(
    settings: rollcage.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would go on without the scripted model, which ends with the call."""
    started, start = anyio.Event(), Groups.start

    async def slowly(*args: Any, **more: Any) -> Group:
        group = await start(*args, **more)
        started.set()
        await anyio.sleep(0.05)
        return group

    monkeypatch.setattr(Groups, "start", slowly)
    async with rollcage.open_runner(settings=settings) as runner:
        async with anyio.create_task_group() as tasks:
            own = partial(rollcage.arun_group, runner=runner, settings=settings, endpoint="scripted", agent="shell")
            tasks.start_soon(own, "sleep 600", 2)
            await started.wait()
            tasks.cancel_scope.cancel()
        assert runner.queue.running + runner.queue.waiting == 0
    async with Store.open(settings.log_path) as store:
        assert [row.outcome for row in await store.list(limit=9)] == [rollcage.Outcome.ABORTED] * 2
