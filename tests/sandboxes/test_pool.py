"""The pool: boxes that are open before anybody asks, with and without the agent's server in them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode.agent import OpenCode
from rollcage.errors import SandboxError, SandboxLost, UsageError
from rollcage.gateway import Gateway
from rollcage.results.fold import Rollout
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.base import Provider, Sandbox, run
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.sandboxes.pool import KINDS, Pool, WarmBox
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import AgentSpec, Job, Outcome, SandboxSpec, ScriptedCall, ScriptedTurn, Task

SPEC = SandboxSpec()


class Counted:
    """The local provider, with a count of what it opened and closed."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.broken = False

    @property
    def name(self) -> str:
        return self._provider.name

    def check(self, spec: SandboxSpec) -> None:
        self._provider.check(spec)

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Sandbox]:
        if self.broken:
            raise SandboxError("no box today")
        async with self._provider.open(spec, layers) as box:
            self.opened.append(box.id)
            try:
                yield box
            finally:
                self.closed.append(box.id)


@pytest.fixture
async def provider(state_dir: Path) -> AsyncIterator[Counted]:
    async with LocalProvider(state_dir) as local:
        yield Counted(local)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(120):
        while not holds():
            await anyio.sleep(0.02)


async def test_a_box_is_there_before_it_is_asked_for_and_is_replaced_when_taken(provider: Counted) -> None:
    async with Pool.over(provider, size=2, pause_s=0) as pool:
        pool.prepare(SPEC)
        await until(lambda: pool.ready == 2)
        first = list(provider.opened)
        async with pool.open(SPEC) as box:
            assert box.id in first
            assert (await run(box, ["true"])).code == 0
            await until(lambda: pool.ready == 2)
            assert len(provider.opened) == 3
        assert provider.closed == [box.id], "closed with the block of whoever took it, and not given out again"
    assert sorted(provider.closed) == sorted(provider.opened)


async def test_no_box_is_given_to_two(provider: Counted) -> None:
    seen: list[str] = []

    async def use(pool: Pool) -> None:
        async with pool.open(SPEC) as box:
            seen.append(box.id)
            assert (await run(box, ["sh", "-c", "test ! -e mine && touch mine"])).code == 0

    async with Pool.over(provider, size=3, pause_s=0) as pool:
        pool.prepare(SPEC)
        await until(lambda: pool.ready == 3)
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(use, pool)
    assert len(set(seen)) == 12


async def test_a_kind_is_kept_from_the_first_time_it_is_asked_for_and_other_kinds_apart(provider: Counted) -> None:
    other = SandboxSpec(pids=64)
    async with Pool.over(provider, size=1, pause_s=0) as pool:
        async with pool.open(SPEC):
            pass
        await until(lambda: pool.ready == 1)
        [kept] = set(provider.opened) - set(provider.closed)
        async with pool.open(other) as box:
            assert box.id != kept
        async with pool.open(SPEC) as box:
            assert box.id == kept


async def test_the_kind_that_nobody_asks_for_gives_way(provider: Counted) -> None:
    async with Pool.over(provider, size=1, pause_s=0) as pool:
        for number in range(KINDS + 1):
            pool.prepare(SandboxSpec(pids=100 + number))
            await until(lambda number=number: len(provider.opened) == number + 1)  # type: ignore[misc]
        await until(lambda: provider.closed == provider.opened[:1])
        assert pool.ready == KINDS


async def test_boxes_that_were_lost_while_they_waited_are_not_given_out(state_dir: Path) -> None:
    """The fork server of all local boxes is killed: what was open is gone, and the provider starts anew."""
    async with LocalProvider(state_dir) as local, Pool.over(local, size=2, pause_s=0) as pool:
        pool.prepare(SPEC)
        await until(lambda: pool.ready == 2)
        fork_server = local._fork_server
        assert fork_server is not None
        os.kill(fork_server.pid, signal.SIGKILL)
        async with pool.open(SPEC) as box:
            assert (await run(box, ["true"])).code == 0
        await until(lambda: pool.ready == 2)


async def test_what_breaks_is_told_to_whoever_asks_and_not_tried_without_end(provider: Counted) -> None:
    provider.broken = True
    async with Pool.over(provider, size=1, pause_s=0) as pool:
        for _ in range(2):
            with pytest.raises(SandboxError, match="no box today"):
                async with pool.open(SPEC):
                    pass
        provider.broken = False
        async with pool.open(SPEC):
            await until(lambda: pool.ready == 1)


async def test_a_pool_that_is_closed_takes_its_boxes_with_it_also_when_cancelled(provider: Counted) -> None:
    with anyio.move_on_after(30) as scope:
        async with Pool.over(provider, size=2, pause_s=0) as pool:
            pool.prepare(SPEC)
            await until(lambda: pool.ready == 2)
            async with pool.open(SPEC):
                scope.cancel()
                await anyio.sleep_forever()
    assert sorted(provider.closed) == sorted(provider.opened)


async def test_a_pool_of_nothing_is_refused(provider: Counted) -> None:
    with pytest.raises(UsageError, match="size 0"):
        async with Pool.over(provider, size=0, pause_s=0):
            pass


# With the agent's server in them.


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command, "description": "work"}),))


TASK = Task(
    instruction="Do it.",
    files={"seed.txt": "seeded\n"},
    setup=("echo outside > ~/outside.txt",),
    verify=("grep -qx seeded copy.txt", "grep -qx outside ~/outside.txt"),
    solution=(bash("cp seed.txt copy.txt; echo changed > ~/outside.txt"), ScriptedTurn(text="Done.")),
)


class Warmed:
    """A runner whose boxes come from a pool with warm servers."""

    def __init__(self, runner: Runner, pool: Pool, agent: OpenCode, model: ScriptedModel) -> None:
        self.runner, self.pool, self.agent, self._model = runner, pool, agent, model

    async def play(self, task: Task, agent: AgentSpec | None = None) -> Rollout:
        await until(lambda: len(self.agent._warm) == 1)
        endpoint = self._model.endpoint(task.solution)
        return await self.runner.wait(
            await self.runner.start(Job(task=task, model=endpoint, agent=agent or AgentSpec()))
        )


@pytest.fixture
async def warmed(state_dir: Path, store: Store, model: ScriptedModel) -> AsyncIterator[Warmed]:
    agent = OpenCode(Downloads(state_dir / "cache"))
    async with (
        Gateway.open() as gateway,
        LocalProvider(state_dir) as local,
        Pool.over(local, size=1, warmer=agent, pause_s=0) as pool,
        Runner.open(store, Registry({"local": pool}, {"opencode": agent}, gateway)) as runner,
    ):
        pool.prepare(SPEC, agent.layers())
        yield Warmed(runner, pool, agent, model)


async def test_a_rollout_in_a_warm_box_is_like_any_other(warmed: Warmed) -> None:
    await until(lambda: warmed.pool.ready == 1)
    [name] = warmed.agent._warm
    rollout = await warmed.play(TASK)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.sandbox_id == name
    assert rollout.agent_events[0].event.type == "session", "by the server that was there"
    assert rollout.reward == 1, "what the agent changed outside the workdir is not seen"
    assert all(turn.trainable for turn in rollout.turns)
    assert rollout.files["copy.txt"] == "seeded\n"


@pytest.mark.slow
@pytest.mark.parametrize("agent", [AgentSpec(env={"GREETING": "salut"}), AgentSpec(driver="run")], ids=["env", "run"])
async def test_a_warm_server_that_does_not_fit_is_stopped_and_not_used(agent: AgentSpec, warmed: Warmed) -> None:
    task = TASK.model_copy(update={"solution": (bash("cp seed.txt copy.txt; echo $GREETING"), ScriptedTurn(text="ok"))})
    rollout = await warmed.play(task, agent)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.reward == 1
    assert ("salut" in str(rollout.agent_events)) == bool(agent.env)


async def test_a_box_whose_server_died_is_taken_off_the_shelf(warmed: Warmed) -> None:
    await until(lambda: warmed.pool.ready == 1)
    [name] = warmed.agent._warm
    await warmed.agent._warm[name].stop()
    await until(lambda: warmed.pool.ready == 0)
    async with warmed.pool.open(SPEC, warmed.agent.layers()) as box:
        assert box.id != name
    await until(lambda: warmed.pool.ready == 1)


async def test_a_warm_box_cannot_be_rewound(warmed: Warmed) -> None:
    await until(lambda: warmed.pool.ready == 1)
    async with warmed.pool.open(SPEC, warmed.agent.layers()) as box:
        assert isinstance(box, WarmBox)
        assert (await run(box, ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/7001"])).code == 0, "its server listens"
    with pytest.raises(SandboxLost):
        await run(box, ["true"])
