"""Agents on remote environments: the real OpenCode, a local Fleet behind its real SDK, a scripted model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import SecretStr

from rollcage.environments.base import MOST, called
from rollcage.environments.fleet.provider import FleetEnvironments
from rollcage.errors import UsageError
from rollcage.events import StageStarted, ToolCalled
from rollcage.mcp.bridge import ToolCall
from rollcage.results.fold import Rollout
from rollcage.runner import Registry, Runner
from rollcage.runner.replay import replay
from rollcage.sandboxes.e2b.provider import E2BProvider
from rollcage.simulators import FleetRuntime, ScriptedModel
from rollcage.simulators.fleet.task import charged_twice, desk_task
from rollcage.store import Store
from rollcage.types import AgentSpec, Job, Limits, Outcome, SandboxSpec, ScriptedTurn, Stage, Task
from support.e2b_runtime import E2BRuntime
from support.remote_work import DESK, Greeter, mcp_server, openenv_server, tool, with_environments

pytestmark = pytest.mark.anyio

LIMITS = Limits(agent_timeout_s=300, verify_timeout_s=120)
LOOP = AgentSpec(name="loop")
SHELL = AgentSpec(name="shell")


@pytest.fixture
async def runner(store: Store, backends: Registry, fleet: FleetRuntime) -> AsyncIterator[Runner]:
    async with Runner.open(store, with_environments(backends, fleet)) as opened:
        yield opened


async def worked(
    runner: Runner, model: ScriptedModel, task: Task, agent: AgentSpec = LOOP, environment: str = DESK
) -> Rollout:
    endpoint = model.endpoint(task.solution)
    job = Job(task=task, model=endpoint, agent=agent, environment=environment)
    with anyio.fail_after(120):
        return await runner.wait(await runner.start(job))


def script(text: str, **more: Any) -> Task:
    """A task for the agent `shell`."""
    return Task(instruction=text, limits=LIMITS, **more)


@pytest.mark.parametrize("driver", ["serve", pytest.param("run", marks=pytest.mark.slow)])
async def test_opencode_works_on_an_environment_and_its_verifier_gives_the_reward(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime, driver: str
) -> None:
    rollout = await worked(runner, model, desk_task(), AgentSpec(driver=driver))
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.score is not None
    assert (rollout.reward, rollout.score.source) == (1.0, "environment")
    assert rollout.environment is not None
    assert (rollout.environment.name, rollout.environment.instance_id) == ("ticket-desk:v1.1.0", "local-1")
    assert "search_tickets" in rollout.environment.tools
    names = ["search_tickets", "read_ticket", "assign_ticket", "reply_to_ticket", "resolve_ticket"]
    assert [call.name for call in rollout.tool_calls] == names
    assert rollout.tool_calls[1].arguments == {"ticket_id": charged_twice(7)}
    assert "Charged twice" in rollout.tool_calls[1].answer
    assert not any(call.failed or call.error for call in rollout.tool_calls)
    assert len(rollout.turns) == 6
    assert all(turn.trainable for turn in rollout.turns)
    offered = [one["function"]["name"] for one in rollout.turns[0].request["tools"]]
    assert {"env_search_tickets", "bash"} <= set(offered)
    manager = fleet.instances["local-1"].manager
    assert manager is not None
    assert manager.resets == [7]


@pytest.mark.parametrize("agent", [LOOP, AgentSpec()], ids=["loop", "opencode"])
async def test_a_rollout_on_an_environment_is_replayed_on_another_of_the_same_start(
    agent: AgentSpec, runner: Runner, model: ScriptedModel
) -> None:
    original = await worked(runner, model, desk_task(prefix="") if agent is LOOP else desk_task(), agent)
    played, report = await replay(runner, original)
    assert (report.differences, report.reward_before, report.reward) == ((), 1.0, 1.0), played.error
    assert [call.name for call in played.tool_calls] == [call.name for call in original.tool_calls]
    assert played.environment and original.environment
    assert played.environment.instance_id != original.environment.instance_id


@pytest.mark.slow
async def test_an_agent_with_no_tools_of_its_own_still_has_the_environments(
    runner: Runner, model: ScriptedModel
) -> None:
    rollout = await worked(runner, model, desk_task(), AgentSpec(enabled_tools=()))
    assert rollout.reward is not None, rollout.error
    assert rollout.reward == 1.0
    offered = [one["function"]["name"] for one in rollout.turns[0].request["tools"]]
    assert offered
    assert all(name.startswith("env_") for name in offered)


async def test_the_loop_needs_no_box_and_leaves_the_same_kind_of_log(runner: Runner, model: ScriptedModel) -> None:
    rollout = await worked(runner, model, desk_task(prefix=""))
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.reward == 1.0
    assert rollout.sandbox_id.startswith("none-")
    assert len(rollout.tool_calls) == 5
    assert len(rollout.turns) == 6
    assert all(turn.trainable and turn.session for turn in rollout.turns)
    assert [emitted.event.type for emitted in rollout.agent_events] == ["tool_call"] * 5 + ["text"]


async def test_the_loop_tells_the_model_what_it_got_wrong_and_goes_on(runner: Runner, model: ScriptedModel) -> None:
    turns = (
        tool("no_such_tool"),
        tool("read_ticket", ticket_id="one"),
        ScriptedTurn(text="I give up."),
    )
    rollout = await worked(runner, model, desk_task(prefix="").model_copy(update={"solution": turns}))
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.reward == 0.0
    told = [message["content"] for message in rollout.turns[-1].request["messages"] if message["role"] == "tool"]
    assert "no tool 'no_such_tool'" in told[0]
    assert "valid" in told[1]
    assert [(call.name, call.failed) for call in rollout.tool_calls] == [("read_ticket", True)]


async def test_the_loop_stops_at_the_limit_of_turns_and_is_scored(runner: Runner, model: ScriptedModel) -> None:
    rollout = await worked(runner, model, desk_task(prefix="", limits=LIMITS.model_copy(update={"max_turns": 3})))
    assert rollout.outcome is Outcome.LIMIT_REACHED, rollout.error
    assert len(rollout.turns) == 3
    assert rollout.reward == pytest.approx(1 / 3, abs=1e-3)


HOSTILE = r"""
env; cat /proc/self/environ /proc/*/environ /proc/*/cmdline; cat /proc/net/tcp /proc/net/unix; grep -ra . ~ /tmp /etc
python3 - <<'END'
import json, os, urllib.request
root = os.environ["TOOLS_URL"].removesuffix("/mcp")
def ask(path, body=None, method=None):
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(root + path, data, {"content-type": "application/json"}, method=method)
    try:
        return urllib.request.urlopen(request, timeout=300).read().decode()
    except Exception as error:
        return f"{error} {getattr(error, 'read', bytes)()}"
def rpc(method, **params):
    return ask("/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
for path in ("/", "/reset", "/step", "/state", "/api/v1/env/reset", "/v1/env/instances", "/mcp/../reset", "/ws"):
    print("PATH", path, ask(path), ask(path, {}), ask(path, {}, "PUT"))
for name in ("reset", "step", "state", "close", "verify", "openenv/session/create", "no_such_tool", "read_ticket"):
    print("CALL", name, rpc("tools/call", name=name, arguments={"ticket_id": "x"}), rpc(name))
deep = '{"a":' * 900 + "1" + "}" * 900
long = '{"x": "' + "y" * 1000000 + '"}'
for arguments in (deep, '{"ticket_id": "\\ud800"}', '{"ticket_id": 1e999}', "{" * 100000, long):
    params = '{"name": "read_ticket", "arguments": ' + arguments + "}"
    body = '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": ' + params + "}"
    request = urllib.request.Request(root + "/mcp", body.encode(), {"content-type": "application/json"})
    try:
        print("ODD", urllib.request.urlopen(request, timeout=300).read()[:300])
    except Exception as error:
        print("ODD", error)
print(rpc("tools/list"), rpc("initialize"), rpc("tools/call", name="resolve_ticket", arguments={"ticket_id": 101}))
END
"""


async def test_a_hostile_agent_finds_the_tools_and_nothing_else(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime, store: Store
) -> None:
    rollout = await worked(runner, model, script(HOSTILE, environment_seed=7), SHELL)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    heard = str(rollout.agent_events)
    assert "resolved" in heard, "it did reach the tools"
    assert heard.count("404") >= 3 * 8
    assert "there is no such tool" in heard
    assert heard.count("ODD") == 5
    instance = fleet.instances["local-1"]
    assert instance.manager is not None
    assert instance.manager.resets == [7], "only we have reset it"
    secrets = [fleet.key, fleet._token, fleet.base_url.removeprefix("http://"), instance.root.removeprefix("http://")]
    assert [secret for secret in secrets if secret in heard] == []
    log = json.dumps([entry.model_dump(mode="json") for entry in await store.read(rollout.id)])
    assert fleet.key not in log
    assert fleet._token not in log


async def test_the_tools_are_gone_when_the_agent_is(runner: Runner, model: ScriptedModel) -> None:
    """What the agent reaches, a verify command in the same box does not."""
    reach = "python3 -c 'import socket; print(socket.create_connection((\"127.0.0.1\", 7002)))'"
    task = script(f"echo $TOOLS_URL; {reach} && touch reached", verify=("test -e reached", f"{reach} 2>&1"))
    rollout = await worked(runner, model, task, SHELL)
    assert "http://127.0.0.1:7002/mcp" in str(rollout.agent_events)
    assert [result.exit_code for result in rollout.verify] == [0, 1]
    assert "refused" in rollout.verify[1].stdout


async def test_the_environments_reward_is_the_total_and_verify_commands_are_a_part(
    runner: Runner, model: ScriptedModel
) -> None:
    solution = (*desk_task().solution[:3], ScriptedTurn(text="Done."))
    task = desk_task().model_copy(update={"verify": ("true", "false"), "solution": solution})
    rollout = await worked(runner, model, task, AgentSpec())
    assert rollout.reward is not None, rollout.error
    assert rollout.reward == pytest.approx(1 / 3, abs=1e-3)
    assert rollout.reward_parts == {"verify": 0.5}
    plain = await worked(runner, model, script("true", verify=("true", "false")), SHELL)
    assert plain.score is not None
    assert (plain.reward, plain.score.source) == (0.5, "commands"), "without a verifier, theirs is the total"
    nothing = await worked(runner, model, script("true"), SHELL)
    assert (nothing.outcome, nothing.reward) == (Outcome.FINISHED, None)


@pytest.mark.parametrize(
    "verifier",
    ["def verify(before, after, answer=None): raise ValueError('oops')", "no python", "def verify(*_): return 'good'"],
)
async def test_a_verifier_that_breaks_gives_no_reward_and_not_zero(
    runner: Runner, model: ScriptedModel, verifier: str
) -> None:
    task = desk_task(prefix="").model_copy(update={"verifier": verifier})
    rollout = await worked(runner, model, task)
    assert (rollout.outcome, rollout.error_code, rollout.reward) == (Outcome.VERIFY_FAILED, "bad_reward", None)


@pytest.mark.slow
async def test_a_verifier_that_hangs_ends_at_its_deadline(runner: Runner, model: ScriptedModel) -> None:
    limits = LIMITS.model_copy(update={"verify_timeout_s": 3})
    slow = "def verify(*_):\n    import time\n    time.sleep(20)"
    task = desk_task(prefix="", limits=limits).model_copy(update={"verifier": slow})
    rollout = await worked(runner, model, task)
    assert (rollout.outcome, rollout.error_code, rollout.reward) == (Outcome.VERIFY_FAILED, "verify_timeout", None)


async def test_an_environment_lost_under_the_agent_is_not_scored(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime, store: Store
) -> None:
    task = desk_task(prefix="")
    started = await runner.start(Job(task=task, model=model.endpoint(task.solution), agent=LOOP, environment=DESK))
    with anyio.fail_after(120):
        async for entry in store.follow(started):
            if isinstance(entry.event, ToolCalled):
                await fleet.instance().lose()
                break
        rollout = await runner.wait(started)
    assert (rollout.outcome, rollout.error_code) == (Outcome.ENVIRONMENT_FAILED, "environment_lost"), rollout.error
    assert rollout.reward is None
    assert any(call.failed and call.error for call in rollout.tool_calls)


async def test_a_reset_that_is_refused_ends_the_rollout_before_the_agent(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime
) -> None:
    fleet.faults.reset_refused["ticket-desk"] = "seeds are not taken here"
    rollout = await worked(runner, model, desk_task())
    assert (rollout.outcome, rollout.error_code) == (Outcome.ENVIRONMENT_FAILED, "reset_failed")
    assert rollout.error is not None
    assert "seeds are not taken here" in rollout.error
    assert (rollout.turns, rollout.reward, rollout.sandbox_id) == ((), None, "")


@pytest.mark.parametrize(("fault", "code"), [("quota", "environment_failed"), ("tools", "environment_lost")])
async def test_an_environment_that_cannot_be_had_has_a_code_of_its_own(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime, fault: str, code: str
) -> None:
    if fault == "quota":
        fleet.faults.quota = 0
    else:
        fleet.faults.refusing |= {"mcp", "api/v1/mcp"}
    rollout = await worked(runner, model, desk_task())
    assert (rollout.outcome, rollout.error_code) == (Outcome.ENVIRONMENT_FAILED, code), rollout.error
    assert rollout.turns == ()


async def test_an_abort_or_the_deadline_while_it_boots_releases_it(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime, store: Store
) -> None:
    fleet.faults.boot_s = 600
    task = desk_task(limits=Limits(timeout_s=4, verify_timeout_s=1))
    late = await worked(runner, model, task)
    assert (late.outcome, late.error_code) == (Outcome.TIMED_OUT, "timed_out")
    assert fleet.running == []
    before = fleet.creations
    started = await runner.start(Job(task=desk_task(), model=model.endpoint(()), environment=DESK))
    with anyio.fail_after(120):
        async for entry in store.follow(started):
            if isinstance(entry.event, StageStarted) and entry.event.stage is Stage.PROVISION:
                break
        while fleet.creations == before:
            await anyio.sleep(0.02)
        await runner.abort(started)
        assert (await runner.wait(started)).outcome is Outcome.ABORTED
    assert fleet.running == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ("fleet:", "rollcage fleet ls"),
        ("fleet", "rollcage fleet ls"),
        ("gym:cartpole", "known: fleet, mcp, openenv"),
        ("mcp:nowhere", "mcp:http://host"),
        ("openenv:ftp://host", "openenv:http://host"),
        ("mcp:http://name:word@host/mcp", "password"),
    ],
)
async def test_an_address_that_makes_no_sense_is_refused_before_anything_starts(
    runner: Runner, model: ScriptedModel, fleet: FleetRuntime, environment: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        await runner.start(Job(task=script("true"), model=model.endpoint(()), environment=environment))
    assert fleet.creations == 0


async def test_what_does_not_go_together_is_refused(runner: Runner, model: ScriptedModel) -> None:
    endpoint = model.endpoint(())
    wrong = [
        (Job(task=script("true", verifier="x"), model=endpoint), "verifier: goes with a remote environment"),
        (Job(task=script("true", environment_seed=1), model=endpoint), "environment_seed: goes with"),
        (Job(task=script("true"), model=endpoint, agent=LOOP), "agent: loop has the tools of a remote"),
        (Job(task=script("x", verify=("true",)), model=endpoint, agent=LOOP, environment=DESK), "verify: agent loop"),
        (Job(task=script("x", verifier="x"), model=endpoint, environment="mcp:http://h/mcp"), "no verifier"),
        (Job(task=script("x", verifier="x"), model=endpoint, environment="openenv:http://h"), "verifier: an OpenEnv"),
    ]
    for job, said in wrong:
        with pytest.raises(UsageError, match=said):
            await runner.start(job)
    with pytest.raises(UsageError, match="FLEET_API_KEY is not set"):
        FleetEnvironments(SecretStr("")).check("ticket-desk", script("true"))


async def test_the_tools_of_any_mcp_server_can_be_given(runner: Runner, model: ScriptedModel) -> None:
    greeter = Greeter()
    task = Task(instruction="Greet.", solution=(tool("greet", name="Ada"), ScriptedTurn(text="Done.")), limits=LIMITS)
    async with mcp_server(greeter) as url:
        rollout = await worked(runner, model, task, environment=f"mcp:{url}")
    assert (rollout.outcome, rollout.reward) == (Outcome.FINISHED, None), rollout.error
    assert greeter.greeted == ["Ada"]
    assert rollout.tool_calls[0].answer == "Hello Ada."
    gone = await worked(runner, model, task, environment=f"mcp:{url}")
    assert (gone.outcome, gone.error_code) == (Outcome.ENVIRONMENT_FAILED, "environment_lost")


@pytest.mark.slow
async def test_an_openenv_server_gives_its_tools_and_its_own_reward(runner: Runner, model: ScriptedModel) -> None:
    turns = (tool("add", number=3), tool("add", number=-1), tool("reset"), ScriptedTurn(text="Done."))
    task = Task(instruction="Count.", solution=turns, environment_seed=2, limits=LIMITS)
    with openenv_server() as url:
        rollout = await worked(runner, model, task, environment=f"openenv:{url}")
        assert rollout.outcome is Outcome.FINISHED, rollout.error
        assert rollout.score is not None
        assert (rollout.reward, rollout.score.source) == (0.5, "environment"), "2 from the seed, 3 added"
        assert [(call.name, call.failed) for call in rollout.tool_calls] == [("add", False), ("add", True)]
        assert "only upwards" in rollout.tool_calls[1].answer
        opencode = task.model_copy(update={"solution": (tool("env_add", number=6), ScriptedTurn(text="Done."))})
        second = await worked(runner, model, opencode, AgentSpec(), environment=f"openenv:{url}")
        assert second.reward is not None, second.error
        assert second.reward == 0.8, "a session of its own, from its own start"
        idle = task.model_copy(update={"solution": (ScriptedTurn(text="Nothing to do."),)})
        third = await worked(runner, model, idle, environment=f"openenv:{url}")
        assert (third.outcome, third.reward) == (Outcome.FINISHED, None), "listing tools earns nothing"
    gone = await worked(runner, model, task, environment=f"openenv:{url}")
    assert (gone.outcome, gone.error_code) == (Outcome.ENVIRONMENT_FAILED, "environment_failed")


RESOLVE = """
curl -s "$OPENAI_BASE_URL/models" -H "Authorization: Bearer $OPENAI_API_KEY" &&
curl -s "$TOOLS_URL" -d '{"jsonrpc": "2.0", "id": 1, "method": "tools/call",
  "params": {"name": "resolve_ticket", "arguments": {"ticket_id": 101}}}'
"""


@pytest.mark.slow
async def test_a_box_that_nobody_can_reach_gets_the_tools_over_its_relay(
    store: Store, backends: Registry, fleet: FleetRuntime, model: ScriptedModel, tmp_path: Path
) -> None:
    async with (
        E2BRuntime(tmp_path / "cloud") as cloud,
        E2BProvider(cloud.settings, tmp_path / "home") as boxes,
        Runner.open(store, with_environments(replace(backends, providers={"e2b": boxes}), fleet)) as runner,
    ):
        job = Job(
            task=script(RESOLVE),
            model=model.endpoint(()),
            agent=SHELL,
            sandbox=SandboxSpec(backend="e2b"),
            environment=DESK,
        )
        rollout = await runner.wait(await runner.start(job))
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert [(call.name, call.failed) for call in rollout.tool_calls] == [("resolve_ticket", False)], (
        rollout.agent_events
    )


def test_a_long_call_is_logged_by_its_beginning() -> None:
    call = ToolCall(name="n" * 9999, arguments={"text": "x" * 10_000_000}, error="e" * 9999, seconds=1)
    event = called(call)
    assert len(event.model_dump_json()) < MOST + 5000
    assert event.failed
