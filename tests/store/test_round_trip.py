"""Every event comes out of the store as it went in."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rollcage.agent_events import AgentEvent, AgentText
from rollcage.events import AgentEmitted, Ended, Event, Queued, Requeued, ToolCalled, TurnEnded
from rollcage.results.fold import Rollout
from rollcage.store import Store
from rollcage.types import Alternative, CommandResult, Endpoint, Job, Reward, Task, Token, TokenColumns, Turn

JOB = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)


def members(union: Any) -> tuple[type[BaseModel], ...]:
    """The classes of a union that is told apart by a field."""
    return typing.get_args(typing.get_args(union)[0])


def made(cls: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Values of a class with any contents its fields can have."""
    return st.builds(cls, **{name: contents(field.annotation) for name, field in cls.model_fields.items()})


def contents(annotation: Any) -> st.SearchStrategy[Any]:
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation), annotation:
        case typing.Literal, _:
            return st.sampled_from(arguments)
        case origin, _ if origin is dict and arguments[1] is Any:
            return json_objects
        case origin, _ if origin is dict:
            return st.dictionaries(st.text(max_size=5), contents(arguments[1]), max_size=3)
        case origin, _ if origin is tuple:
            return st.lists(contents(arguments[0]), max_size=2).map(tuple)
        case _, cls if cls in (CommandResult, Reward):
            return made(cls)
        case _, cls if isinstance(cls, type) and cls in members(AgentEvent):
            return made(cls)
        case _, cls if cls is float:
            return st.floats(allow_nan=False)
        case _ if arguments and dict in (typing.get_origin(each) for each in arguments):
            return st.none() | json_objects
        case _:
            return st.from_type(annotation)


agent_events = st.one_of([made(cls) for cls in members(AgentEvent)])
emitted = st.builds(AgentEmitted, event=agent_events, raw=st.none() | json_objects)
turns = st.builds(TurnEnded, turn=st.builds(Turn, request=json_objects, message=json_objects))
OTHERS = [cls for cls in members(Event) if cls not in (Queued, Requeued, TurnEnded, AgentEmitted, Ended)]
"""`queued`, `requeued` and `ended` have their places in a log; the tests of the store have them."""
events = st.one_of([emitted, turns, *map(made, OTHERS)])


@pytest.mark.anyio
@given(st.lists(events, max_size=8))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_every_event_comes_back_as_it_went_in(tmp_path_factory: pytest.TempPathFactory, log: list[Event]) -> None:
    folder: Path = tmp_path_factory.mktemp("log")
    async with Store.open(folder / "log.db") as store:
        await store.append("r", Queued(job=JOB))
        for event in log:
            await store.append("r", event)
        read = await store.read("r")
        assert [entry.event for entry in read[1:]] == log
        assert await store.rollout("r") == Rollout.fold(read)


@pytest.mark.anyio
async def test_infinities_come_back_as_they_went_in(tmp_path: Path) -> None:
    """A model can write 1e999, which every JSON reader takes for infinity."""
    endless = {"": float("inf"), "deep": [{"least": float("-inf")}]}
    log: list[Event] = [ToolCalled(name="wait", arguments=endless), AgentEmitted(event=AgentText(text=""), raw=endless)]
    async with Store.open(tmp_path / "log.db") as store:
        await store.append("r", Queued(job=JOB))
        for event in log:
            await store.append("r", event)
        assert [entry.event for entry in await store.read("r")][1:] == log


@pytest.mark.parametrize("count", [0, 1, 7, 8, 300])
async def test_a_turn_is_in_its_own_row_and_its_tokens_are_columns_however_few(tmp_path: Path, count: int) -> None:
    tokens = tuple(Token(f"<{n}>", n, -n / 8, (Alternative("é", None, -9.1),) * (n % 3)) for n in range(count))
    said = {"model": "m", "messages": [{"role": "user", "content": "long " * 200}]}
    turn = Turn(index=0, request=said, message={"content": "x"}, prompt_ids=(1, 2), tokens=TokenColumns.of(tokens))
    async with Store.open(tmp_path / "log.db") as store:
        await store.append("r", Queued(job=JOB))
        await store.append("r", TurnEnded(turn=turn))
        body = await store.ask(lambda c: c.execute("SELECT body FROM entries WHERE kind = 'turn_ended'").fetchone()[0])
        kept = json.loads(body)["turn"]
        assert kept["message"] == {"content": "x"} and list(kept["request"]["messages"][0]["content"]) == ["$blob"]
        assert list(kept["tokens"]) == ([] if not count else ["$blob"] if count > 50 else ["$columns"])
        [entry] = await store.read("r", kinds=("turn_ended",))
        assert entry.event == TurnEnded(turn=turn.model_copy(update={"tokens": tokens}))
