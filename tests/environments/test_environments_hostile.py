"""Environments and models that nobody vouches for: rollouts on them end as they should, and never with a wrong 0."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import SecretStr
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Response

from rollcage.agent_events import AgentEvent
from rollcage.agents.base import AgentContext, AgentExit
from rollcage.agents.loop import LONGEST, Loop
from rollcage.environments.base import Environment
from rollcage.environments.failures import reward_of
from rollcage.environments.fleet import ListToolsAction, ToolFailed, ToolResult
from rollcage.environments.openenv import MOST, OpenEnvEnvironments
from rollcage.errors import EnvironmentFailed, EnvironmentLost, ScoringError, UsageError
from rollcage.events import AgentEmitted, ToolCalled
from rollcage.mcp.bridge import serve_tools
from rollcage.results.fold import Rollout
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.in_process import InProcessProvider
from rollcage.simulators import FleetRuntime, ScriptedModel
from rollcage.simulators.fleet.listener import LoopbackListener
from rollcage.simulators.fleet.task import desk_task
from rollcage.store import Store
from rollcage.types import AgentSpec, Endpoint, Job, Limits, Outcome, SandboxSpec, ScriptedTurn, Task
from support.remote_work import DESK, Greeter, mcp_server, tool, with_environments

pytestmark = pytest.mark.anyio

LOOP = AgentSpec(name="loop")
DEEP = '{"name":' * 900 + "1" + "}" * 900
TASK = Task(instruction="Look.")


@pytest.fixture
async def runner(store: Store, backends: Registry, fleet: FleetRuntime) -> AsyncIterator[Runner]:
    async with Runner.open(store, with_environments(backends, fleet)) as opened:
        yield opened


class OpenEnv:
    """An OpenEnv server that says what a test makes it say, one text per frame; none: the connection breaks."""

    def __init__(self) -> None:
        self.address = ""
        self.sessions = 0
        self.says: dict[str, str | None] = {}
        self.redirect = ""

    async def talk(self, connection: ServerConnection) -> None:
        self.sessions += 1
        async for frame in connection:
            asked = json.loads(frame)
            kind = asked["type"]
            kind = asked["data"]["type"] if kind == "step" else kind
            said = self.says.get(kind, '{"type": "observation", "data": {"observation": {}}}')
            if said is None:
                connection.transport.abort()
                return
            await connection.send(said)

    def tools(self, tools: Any) -> None:
        self.says["list_tools"] = json.dumps({"type": "observation", "data": {"observation": {"tools": tools}}})

    def moved(self, connection: ServerConnection, request: Any) -> Response | None:
        return Response(307, "Moved", Headers(Location=self.redirect)) if self.redirect else None


@asynccontextmanager
async def openenv() -> AsyncIterator[OpenEnv]:
    env = OpenEnv()
    env.tools([{"name": "look"}])
    async with serve(env.talk, "127.0.0.1", 0, process_request=env.moved, max_size=None) as server:
        env.address = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        yield env


@asynccontextmanager
async def at(env: OpenEnv) -> AsyncIterator[Environment]:
    async with OpenEnvEnvironments().open(env.address) as environment:
        await environment.reset(None)
        await environment.tools.list_tools()
        yield environment


@pytest.mark.parametrize(
    ("written", "reward"), [("0.5", 0.5), ("0", 0.0), ("true", 1.0), ("false", 0.0), ("null", None)]
)
async def test_a_reward_is_what_the_server_says(written: str, reward: float | None) -> None:
    async with openenv() as env:
        env.says["call_tool"] = f'{{"data": {{"observation": {{"result": "ok"}}, "reward": {written}}}}}'
        async with at(env) as environment:
            await environment.tools.call_tool("look")
            assert await environment.reward(TASK) == reward


@pytest.mark.parametrize("written", ["NaN", "Infinity", "-1e999", "9" * 400, '"1.0"', "[1.0]", '{"a": 1}', '""'])
async def test_what_is_no_number_is_no_reward(written: str) -> None:
    async with openenv() as env:
        env.says["call_tool"] = f'{{"data": {{"observation": {{"result": "ok"}}, "reward": {written}}}}}'
        async with at(env) as environment:
            assert (await environment.tools.call_tool("look")).text == "ok", "the agent's business goes on"
            with pytest.raises(ScoringError, match="which is no reward"):
                await environment.reward(TASK)
        with pytest.raises(ScoringError, match="which is no reward"):
            reward_of("a state", json.loads(written))


async def test_an_openenv_server_that_goes_while_it_should_judge_is_lost() -> None:
    async with openenv() as env:
        env.says["call_tool"] = '{"data": {"observation": {"result": "ok"}, "reward": 1.0}}'
        env.says["state"] = None
        async with at(env) as environment:
            await environment.tools.call_tool("look")
            with pytest.raises(EnvironmentLost, match="closed the connection"):
                await environment.reward(TASK)


@pytest.mark.parametrize(
    "said", ["[" * 100_000, "no JSON", "[]", "3", '{"type": "error"}', '{"type": "error", "data": 3}']
)
async def test_a_server_that_talks_nonsense_has_failed_and_says_where(said: str) -> None:
    async with openenv() as env:
        env.says["state"] = said
        async with at(env) as environment:
            with pytest.raises(EnvironmentFailed, match=r"openenv:http://127"):
                await environment.reward(TASK)
            env.says["call_tool"] = said
            with pytest.raises(ToolFailed):
                await environment.tools.call_tool("look")


async def test_odd_tools_are_made_harmless_and_too_many_are_refused() -> None:
    async with openenv() as env:
        deep = json.loads('{"a":' * 900 + "1" + "}" * 900)
        odd = [{"name": None}, {"name": ""}, "x", {"name": "\x1b[2J"}, {"name": "deep", "input_schema": deep}]
        env.tools([*odd, {"name": "half \ud800", "description": "\ud83d"}, {"name": "reset"}])
        async with at(env) as environment:
            listed = await environment.tools.list_tools()
            assert listed.names == ["__2J", "deep", "half__"]
            listed.model_dump_json()
        env.tools({"not": "a list"})
        async with at(env) as environment:
            assert (await environment.tools.list_tools()).names == []
        env.tools([{"name": f"t{n}"} for n in range(MOST + 1)])
        with pytest.raises(EnvironmentFailed, match=f"more than {MOST} tools"):
            async with at(env):
                pass


async def test_a_redirect_of_an_openenv_server_is_not_followed() -> None:
    async with openenv() as inner, openenv() as outer:
        outer.redirect = inner.address.replace("http", "ws") + "/ws"
        with pytest.raises(EnvironmentFailed, match="check that the server runs and speaks OpenEnv"):
            async with at(outer):
                pass
        assert inner.sessions == 0


async def test_two_sessions_on_one_openenv_server_are_apart() -> None:
    async with openenv() as env, at(env) as first, at(env) as second:
        env.says["call_tool"] = '{"data": {"observation": {"result": "ok"}, "reward": 0.25}}'
        await first.tools.call_tool("look")
        assert (await first.reward(TASK), await second.reward(TASK)) == (0.25, None)
        assert env.sessions == 2


@pytest.mark.parametrize("place", ["http://[::1", "http://host:99999", "http://host:x", "http://ho\x07st"])
@pytest.mark.parametrize("kind", ["mcp", "openenv"])
async def test_addresses_that_cannot_be_are_refused(runner: Runner, kind: str, place: str) -> None:
    job = Job(task=TASK, model=Endpoint(base_url="http://m/v1", model="m"), agent=LOOP, environment=f"{kind}:{place}")
    with pytest.raises(UsageError, match=f"{kind}: is followed by an address"):
        await runner.start(job)


async def finished(runner: Runner, rollout_id: str) -> Rollout:
    with anyio.fail_after(300):
        return await runner.wait(rollout_id)


async def test_two_rollouts_on_one_environment_have_an_instance_each(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime
) -> None:
    task = desk_task(prefix="")
    lazy = task.model_copy(update={"solution": (ScriptedTurn(text="No."),)})
    jobs = [Job(task=one, model=model.endpoint(one.solution), agent=LOOP, environment=DESK) for one in (task, lazy)]
    started = [await runner.start(job) for job in jobs]
    rollouts = [await finished(runner, rollout_id) for rollout_id in started]
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]
    assert len({rollout.environment.instance_id for rollout in rollouts if rollout.environment}) == 2


async def test_an_instance_that_dies_while_it_judges_leaves_no_reward(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    judge = f"def verify(*_):\n    import pathlib, time\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)"
    limits = Limits(agent_timeout_s=200, verify_timeout_s=200)
    task = desk_task(prefix="", limits=limits).model_copy(update={"verifier": judge})
    started = await runner.start(Job(task=task, model=model.endpoint(task.solution), agent=LOOP, environment=DESK))
    with anyio.fail_after(300):
        while not begun.exists():
            await anyio.sleep(0.05)
        await fleet.instance().lose()
    rollout = await finished(runner, started)
    assert (rollout.outcome, rollout.error_code) == (Outcome.ENVIRONMENT_FAILED, "environment_lost"), rollout.error
    assert rollout.reward is None


async def test_an_mcp_server_that_goes_away_under_the_agent_is_lost(
    runner: Runner, model: ScriptedModel, store: Store
) -> None:
    task = Task(instruction="Greet.", solution=(*[tool("greet", name="Ada")] * 2, ScriptedTurn(text="Done.")))
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(mcp_server(Greeter()))
        job = Job(task=task, model=model.endpoint(task.solution), agent=LOOP, environment=f"mcp:{url}")
        started = await runner.start(job)
        with anyio.fail_after(300):
            async for entry in store.follow(started):
                if isinstance(entry.event, ToolCalled):
                    break
    rollout = await finished(runner, started)
    assert (rollout.outcome, rollout.error_code, rollout.reward) == (
        Outcome.ENVIRONMENT_FAILED,
        "environment_lost",
        None,
    ), rollout.error


class Oddity:
    """A model: these answers in turn, then one that ends the conversation."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.heard: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        self.heard.append(json.loads(body))
        answer = self.answers.pop(0) if self.answers else '{"choices": [{"message": {"content": "Done."}}]}'
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": answer.encode()})

    @property
    def told(self) -> list[str]:
        """What it was told of the tools' answers."""
        return [message["content"] for message in self.heard[-1]["messages"] if message["role"] == "tool"]


class Talker(Greeter):
    """A tool that says a great deal."""

    async def call_tool(self, name: str, arguments: Any = None) -> ToolResult:
        await super().call_tool(name, arguments)
        return ToolResult(tool=name, endpoint="here", content=[{"type": "text", "text": "\ud83d" + "x" * 300_000}])

    async def list_tools(self) -> ListToolsAction:
        return await super().list_tools()


async def looped(model: Oddity, tools: Greeter) -> tuple[AgentExit, list[AgentEvent]]:
    """The agent `loop` with this model and these tools, as a rollout would run it."""
    emitted: list[AgentEvent] = []

    async def emit(event: Any) -> None:
        if isinstance(event, AgentEmitted):
            emitted.append(event.event)

    async with (
        InProcessProvider().open(SandboxSpec()) as box,
        box.listen(7000) as for_model,
        box.listen(7002) as for_tools,
        serve_tools(tools, for_tools),
    ):
        listener = LoopbackListener(model)
        await listener.start_on(for_model)
        try:
            lent = Endpoint(base_url="http://127.0.0.1:7000/v1", model="m", key=SecretStr("lent"))
            context = AgentContext(lent, "http://127.0.0.1:7002/mcp")
            with anyio.fail_after(120):
                ending = await Loop().solve(box, "Go.", context, LOOP, workdir="/", emit=emit)
        finally:
            await listener.stop()
    return ending, emitted


def calling(arguments: str, name: str = "greet") -> str:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return json.dumps({"choices": [{"message": {"content": "\ud83d", "tool_calls": [call]}}]})


@pytest.mark.parametrize(
    "arguments",
    ["null", "3", "[]", '"x"', "{", "", '{"name": NaN}', '{"name": 1e999}', '{"name": "\\ud83d"}', DEEP, "[" * 100_000],
)
async def test_whatever_a_model_writes_as_arguments_it_is_told_and_the_loop_goes_on(arguments: str) -> None:
    model = Oddity(calling(arguments))
    ending, emitted = await looped(model, Greeter())
    assert ending == AgentExit(code=0, error=None)
    assert len(model.told) == 1
    assert [one.type for one in emitted] == ["text", "tool_call", "text"]


@pytest.mark.parametrize(
    "answer",
    ["{}", "[]", "no JSON", "[" * 100_000, '{"choices": {}}', '{"choices": [3]}', '{"choices": [{"message": 3}]}'],
)
async def test_a_model_that_answers_nonsense_is_no_agent_that_is_done(answer: str) -> None:
    ending, emitted = await looped(Oddity(answer), Greeter())
    assert ending == AgentExit(code=1, error="the model's answer holds no message")
    assert emitted[-1].type == "error"


@pytest.mark.parametrize("calls", ["3", "[3, null]", "{}"])
async def test_calls_that_are_none_are_not_made(calls: str) -> None:
    ending, _ = await looped(Oddity(f'{{"choices": [{{"message": {{"tool_calls": {calls}}}}}]}}'), Greeter())
    assert ending == AgentExit(code=0, error=None)


async def test_a_model_is_told_the_beginning_of_a_long_answer() -> None:
    model = Oddity(calling('{"name": "Ada"}'))
    await looped(model, Talker())
    assert len(model.told[0]) < LONGEST + 100
    assert model.told[0].endswith("[200001 characters are left out]")
