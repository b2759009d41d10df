"""Rollouts on nodes: placed, logged once, begun anew or ended when their node is lost."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from rollcage.cluster.head import Head
from rollcage.cluster.messages import Hello
from rollcage.cluster.node import NodeHost
from rollcage.cluster.options import NodeInfo
from rollcage.cluster.outbox import WINDOW, Outbox
from rollcage.errors import StoreError
from rollcage.events import Requeued, StageStarted
from rollcage.runner import Registry, Runner
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import NO_MODEL, AgentSpec, Blame, Job, Outcome, ScriptedTurn, Stage, Task
from support.cluster import DirectLink, Machines, opened_cluster

pytestmark = pytest.mark.anyio


Opened = Callable[..., AbstractAsyncContextManager[tuple[Runner, Head]]]


def shell(command: str, **more: object) -> Job:
    task = Task.model_validate({"instruction": command, "verify": ["test -f done"], **more})
    return Job(task=task, model=NO_MODEL, agent=AgentSpec(name="shell"))


@pytest.fixture
def machines(backends: Registry, tmp_path: Path) -> Machines:
    return Machines(backends, backends.providers["local"], tmp_path)


@pytest.fixture
def opened(store: Store, backends: Registry, machines: Machines, tmp_path: Path) -> Opened:
    @asynccontextmanager
    async def opened(**options: object) -> AsyncIterator[tuple[Runner, Head]]:
        async with opened_cluster(store, backends, machines, tmp_path, **options) as both:
            yield both

    return opened


async def until(check: Callable[[], object]) -> None:
    with anyio.fail_after(300):
        while not check():
            await anyio.sleep(0.01)


async def in_stage(store: Store, rollout_id: str, stage: Stage) -> None:
    async for entry in store.follow(rollout_id):
        if isinstance(entry.event, StageStarted) and entry.event.stage is stage:
            return


async def kinds(store: Store, rollout_id: str) -> list[str]:
    return [entry.event.kind for entry in await store.read(rollout_id)]


async def test_rollouts_run_on_all_nodes_and_their_logs_are_those_of_one_machine(
    opened: Opened, machines: Machines, store: Store, runner: Runner
) -> None:
    plain = await runner.start(shell("touch done"))
    await runner.over(plain)
    for name in ("a", "b", "c"):
        machines.add(name, places=2)
    async with opened() as (cluster, _):
        ids = [await cluster.start(shell("touch done")) for _ in range(9)]
        for each in ids:
            rollout = await cluster.wait(each)
            assert (rollout.outcome, rollout.reward) == (Outcome.FINISHED, 1.0), rollout.error
            assert await kinds(store, each) == await kinds(store, plain)
    used = Counter(name for name, machine in machines.all.items() for _ in machine.orders)
    assert sum(used.values()) == 9 and set(used) == {"a", "b", "c"}


async def test_what_had_not_sampled_is_run_again_elsewhere_when_its_node_is_lost(
    opened: Opened, machines: Machines, store: Store
) -> None:
    first = machines.add("a")
    first.provider.go = anyio.Event()
    async with opened() as (cluster, _):
        rollout_id = await cluster.start(shell("touch done"))
        await in_stage(store, rollout_id, Stage.PROVISION)
        machines.add("b")
        first.kill()
        rollout = await cluster.wait(rollout_id)
    assert rollout.outcome is Outcome.FINISHED and rollout.reward == 1.0
    log = await store.read(rollout_id)
    assert [entry.seq for entry in log] == list(range(1, len(log) + 1))
    assert sum(isinstance(entry.event, Requeued) for entry in log) == 1
    assert [order.attempt for machine in machines.all.values() for order in machine.orders] == [1, 2]


async def test_what_may_have_sampled_ends_as_crashed_and_infrastructure_is_to_blame(
    opened: Opened, machines: Machines, store: Store
) -> None:
    first = machines.add("a")
    async with opened() as (cluster, _):
        rollout_id = await cluster.start(shell("sleep 1000"))
        await in_stage(store, rollout_id, Stage.AGENT)
        machines.add("b")
        first.kill()
        rollout = await cluster.wait(rollout_id)
    assert (rollout.outcome, rollout.blame) == (Outcome.CRASHED, Blame.INFRASTRUCTURE)
    assert "node was lost" in (rollout.error or "") and not machines.all["b"].orders
    assert (await kinds(store, rollout_id)).count("ended") == 1


async def test_a_rollout_that_loses_every_node_is_not_begun_for_ever(
    opened: Opened, machines: Machines, store: Store
) -> None:
    async with opened() as (cluster, _):
        rollout_id = None
        for number in range(5):
            machine = machines.add(f"n{number}")
            machine.provider.go = anyio.Event()
            rollout_id = rollout_id or await cluster.start(shell("touch done"))
            await until(partial(getattr, machine, "orders"))
            machine.kill()
        rollout = await cluster.wait(rollout_id or "")
    assert rollout.outcome is Outcome.CRASHED


async def test_a_node_that_is_cut_off_stops_by_itself_and_only_then_another_begins(
    opened: Opened, machines: Machines, store: Store
) -> None:
    first = machines.add("a")
    first.provider.go = anyio.Event()
    async with opened(lease_s=1.0) as (cluster, _):
        rollout_id = await cluster.start(shell("touch done"))
        await until(lambda: first.orders)
        first.cut, host = True, first.host
        second = machines.add("b")
        assert host is not None and "not heard" in await host.ended()
        # Sooner, the rollout could be given to it once more. What it would still say is heard by nobody.
        await until(lambda: second.orders)
        first.cut = False
        rollout = await cluster.wait(rollout_id)
    assert rollout.outcome is Outcome.FINISHED and second.orders[0].attempt == 2
    assert (await kinds(store, rollout_id)).count("requeued") == 1


async def test_a_node_that_ray_alone_gives_up_is_told_to_end_and_only_then_another_begins(
    opened: Opened, machines: Machines, store: Store
) -> None:
    first = machines.add("a")
    first.lifeline = True
    first.provider.go = anyio.Event()
    async with opened() as (cluster, head):
        rollout_id = await cluster.start(shell("touch done"))
        await until(lambda: first.orders)
        host, states = first.host, set[str]()
        assert host is not None
        machines.add("b")
        first.disowned = True
        with anyio.fail_after(60):  # its lease is ten minutes
            while "a" in head.nodes and head.nodes["a"].info is first.info and first.host is host:
                states.add(head.nodes["a"].state)
                await anyio.sleep(0)
            assert "gave it up" in await host.ended()
            rollout = await cluster.wait(rollout_id)
        assert "unreachable" in states and rollout.outcome is Outcome.FINISHED
    assert [order.attempt for order in machines.all["b"].orders] == [2]


async def test_questions_whose_answers_get_lost_do_not_keep_a_node_alive(
    backends: Registry, machines: Machines, tmp_path: Path
) -> None:
    machine = machines.add("a")
    link = machines.connect(machine.info, 1)
    await link.open(Hello(1, 1.0, Settings(home=tmp_path), str(tmp_path), "none"))
    host = machine.host
    assert host is not None
    news = await link.exchange(0, 0)
    for _ in range(3):  # heard: the lease begins anew
        await anyio.sleep(0.3)
        news = await link.exchange(news.number, 0)
    with anyio.move_on_after(300):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                while True:
                    await link.exchange(news.number, 0)
                    await anyio.sleep(0.01)

            tasks.start_soon(ask)
            assert "not heard" in await host.ended()
            tasks.cancel_scope.cancel()
            return
    raise AssertionError("it goes on, and the head has long given its rollouts to another")


async def test_a_node_that_answers_again_in_time_has_lost_nothing(
    opened: Opened, machines: Machines, store: Store
) -> None:
    machine = machines.add("a")
    async with opened() as (cluster, _):
        rollout_id = await cluster.start(shell("touch done; sleep 1"))
        await in_stage(store, rollout_id, Stage.AGENT)
        machine.cut = True
        await anyio.sleep(1.5)
        machine.cut = False
        rollout = await cluster.wait(rollout_id)
    assert rollout.outcome is Outcome.FINISHED and "requeued" not in await kinds(store, rollout_id)


async def test_an_abort_reaches_the_node(opened: Opened, machines: Machines, store: Store) -> None:
    machine = machines.add("a", places=1)
    async with opened() as (cluster, head):
        running, waiting = [await cluster.start(shell("sleep 1000")) for _ in range(2)]
        await in_stage(store, running, Stage.AGENT)
        for each in (waiting, running):
            assert await cluster.abort(each)
            assert (await cluster.wait(each)).outcome is Outcome.ABORTED
        assert len(machine.orders) == 1 and not head.nodes["a"].flows


async def test_the_key_travels_beside_the_order_and_reaches_the_nodes_gateway_alone(
    opened: Opened, machines: Machines, model: ScriptedModel
) -> None:
    machine = machines.add("a")
    endpoint = model.endpoint((ScriptedTurn(text="done"),))
    key = endpoint.key.get_secret_value()
    ask = (
        'curl -s -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" '
        '-d \'{"model":"model","messages":[{"role":"user","content":"hi"}]}\' $OPENAI_BASE_URL/chat/completions'
    )
    job = shell(f"{ask} > done").model_copy(update={"model": endpoint})
    async with opened() as (cluster, _):
        rollout = await cluster.wait(await cluster.start(job))
    assert rollout.outcome is Outcome.FINISHED and len(rollout.turns) == 1 and rollout.turns[0].status == 200
    assert key and key.encode() not in pickle.dumps(machine.orders)
    assert machine.hello is not None and key.encode() not in pickle.dumps(machine.hello)


async def test_a_pause_holds_every_node_also_one_that_joins_meanwhile(opened: Opened, machines: Machines) -> None:
    hosts: list[NodeHost] = []
    machines.add("a")
    async with opened() as (cluster, head):
        await until(lambda: head.nodes and head.nodes["a"].state == "ready")
        await cluster.gateway.pause()
        machines.add("b")
        await until(lambda: len([node for node in head.nodes.values() if node.state == "ready"]) == 2)
        hosts += [machine.host for machine in machines.all.values() if machine.host]
        assert all(host._registry.gateway.gate.paused for host in hosts)
        cluster.gateway.resume("v2")
        await until(lambda: not any(host._registry.gateway.gate.paused for host in hosts))
        assert {host._registry.gateway.gate.policy_version for host in hosts} == {"v2"}
        assert {host._registry.gateway.gate.generation for host in hosts} == {1}


async def test_only_nodes_with_the_label_are_used_and_draining_ones_get_nothing_new(
    opened: Opened, machines: Machines, store: Store
) -> None:
    machines.add("other", pool="gpu")
    drained = machines.add("a", pool="agents")
    async with opened(labels={"pool": "agents"}) as (cluster, head):
        running = await cluster.start(shell("sleep 3; touch done"))
        await in_stage(store, running, Stage.AGENT)
        drained.info = drained.info.model_copy(update={"draining": True})
        await until(lambda: head.nodes["a"].state == "draining")
        later = machines.add("b", pool="agents")
        assert (await cluster.wait(await cluster.start(shell("touch done")))).outcome is Outcome.FINISHED
        assert (await cluster.wait(running)).outcome is Outcome.FINISHED
        assert len(drained.orders) == 1 and len(later.orders) == 1 and not machines.all["other"].orders


async def test_rollouts_that_no_node_can_run_say_why(
    opened: Opened, machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rollcage.cluster.nodes.STUCK_S", 0.5)
    machines.add("a", places=2, pool="gpu")
    machines.add("b", places=2)
    wrong = {"resources": {"CPU": 64}, "labels": {"pool": "agents"}}
    for options, reason in (
        ({"labels": wrong["labels"]}, "2 x it has no label pool=agents"),
        ({"resources": wrong["resources"]}, "2 x a rollout takes 64 CPU, and it has 2 CPU free"),
    ):
        async with opened(**options) as (cluster, head):
            rollout_id = await cluster.start(shell("touch done"))
            said = ""
            with anyio.fail_after(60):
                while f"no node of the cluster can run rollouts: {reason}" not in said:
                    await anyio.sleep(0.1)
                    said += capsys.readouterr().err
            assert {(view.state, view.problem) for view in head.nodes_view()} == {("unusable", reason[4:])}
            fits = machines.add("c", places=64, pool="agents")
            assert (await cluster.wait(rollout_id)).outcome is Outcome.FINISHED and len(fits.orders) == 1
            assert [view.id for view in head.nodes_view()] == ["c"], "others may be for something else"
        del machines.all["c"]


async def test_what_ray_refuses_of_a_node_is_its_problem_alone(
    opened: Opened, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = machines.connect

    def refusing(node: NodeInfo, places: int) -> DirectLink:
        if node.id == "a":
            raise ValueError("GPU resource quantities >1 must be whole numbers")
        return connect(node, places)

    monkeypatch.setattr(machines, "connect", refusing)
    machines.add("a")
    async with opened() as (cluster, head):
        await until(head.nodes_view)
        assert [view.problem for view in head.nodes_view()] == ["GPU resource quantities >1 must be whole numbers"]
        machines.add("b")
        assert (await cluster.wait(await cluster.start(shell("touch done")))).outcome is Outcome.FINISHED


async def test_a_cluster_that_scales_is_asked_for_room_and_lets_go_of_what_idles(
    opened: Opened, machines: Machines, store: Store
) -> None:
    async with opened(autoscale=True, idle_s=0.5, places=2) as (cluster, _):
        ids = [await cluster.start(shell("touch done")) for _ in range(3)]
        await until(lambda: machines.asked[-1:] == [3])
        machines.add("a")
        for each in ids:
            assert (await cluster.wait(each)).outcome is Outcome.FINISHED
        await until(lambda: [node.state for node in cluster.nodes] == ["resting"])
        await until(lambda: machines.asked[-1] == 0)
        first = machines.all["a"].host
        # It is still there, so it is used again before another comes.
        again = await cluster.wait(await cluster.start(shell("touch done")))
        assert again.outcome is Outcome.FINISHED and machines.all["a"].host is not first


async def test_a_cluster_that_does_not_scale_keeps_its_nodes(opened: Opened, machines: Machines) -> None:
    machines.add("a")
    async with opened(idle_s=0.1) as (_, head):
        await until(lambda: head.nodes and head.nodes["a"].state == "ready")
        await anyio.sleep(1.5)
        assert head.nodes["a"].state == "ready" and not machines.asked


async def test_nodes_are_told_where_an_application_of_ray_serve_answers(opened: Opened, machines: Machines) -> None:
    machines.add("a")
    async with opened(replicas=("http://head:8000/llm/v1", "serve:llm")) as (_, head):
        await until(lambda: head.nodes and head.nodes["a"].state == "ready")
        machines.servers = ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
        machine = machines.add("b")  # comes when the list is another already
        replicas = [machines.all[name].host for name in ("a", "b")]

        def known(host: NodeHost | None) -> bool:
            there = host._registry.gateway.replicas if host and hasattr(host, "_registry") else None
            return bool(there and len(there.addresses) == 2 and there.knows("http://head:8000/llm/v1"))

        await until(lambda: known(machines.all["a"].host) and known(machine.host))
        assert replicas[0] is not None
        there = replicas[0]._registry.gateway.replicas
        assert there.pick("http://head:8000/llm/v1") in {f"http://10.0.0.{n}:30000/llm/v1" for n in (1, 2)}
        machines.servers = []
        await anyio.sleep(1.5)
        assert len(there.addresses) == 2, "no answer of Ray's is no list"


async def test_who_watches_hears_the_model_of_a_node_while_it_speaks(
    opened: Opened, machines: Machines, model: ScriptedModel, store: Store
) -> None:
    machines.add("a")
    endpoint = model.endpoint(tuple(ScriptedTurn(text="word " * 50, token_delay_s=0.05) for _ in range(6)))
    ask = (
        'curl -sN -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" '
        '-d \'{"model":"model","stream":true,"messages":[{"role":"user","content":"hi"}]}\' '
        "$OPENAI_BASE_URL/chat/completions"
    )
    job = shell(f"for i in $(seq 6); do {ask} > done; done").model_copy(update={"model": endpoint})
    async with opened() as (cluster, head):
        rollout_id = await cluster.start(job)
        async for entry in store.follow(rollout_id):
            if entry.event.kind == "agent_started":
                break
        heard = "".join([delta.content async for delta in head.watch(rollout_id)])
        assert (await cluster.wait(rollout_id)).outcome is Outcome.FINISHED
    assert "word word" in heard


async def test_a_full_window_makes_those_who_log_wait_until_the_head_has_taken_something() -> None:
    outbox = Outbox()
    piece = b"x" * (1 << 20)
    written: list[int] = []

    async def write() -> None:
        for _ in range(40):
            written.append(await outbox.put("r", 1, piece))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await anyio.wait_all_tasks_blocked()
        assert len(written) == WINDOW // len(piece) + 1
        seen: list[int] = []
        while len(seen) < 40:
            items = await outbox.news(10)
            seen += [item.number for item in items]
            outbox.acknowledge(seen[-1])
    assert seen == list(range(1, 41)), "in order, each once, none dropped"


async def test_what_nobody_waits_for_goes_with_what_somebody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcage.cluster.outbox.LINGER_S", 300)
    outbox = Outbox()
    told: list[int] = []

    async def tell() -> None:
        told.extend([item.number for item in await outbox.news(300)])
        outbox.acknowledge(told[-1])

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            await outbox.put("r", 1, b"x")
            tasks.start_soon(tell)
            await anyio.wait_all_tasks_blocked()
            await outbox.put("r", 1, b"x")
            await anyio.wait_all_tasks_blocked()
            assert told == []
            await outbox.delivered(await outbox.put("r", 1, b"x"))
    assert told == [1, 2, 3]


async def test_what_is_not_acknowledged_is_told_again_and_a_closed_outbox_takes_nothing() -> None:
    outbox = Outbox()
    for _ in range(3):
        await outbox.put("r", 1, b"x")
    assert [item.number for item in await outbox.news(1)] == [1, 2, 3]
    outbox.acknowledge(1)
    assert [item.number for item in await outbox.news(1)] == [2, 3]
    outbox.close("cut off")
    with pytest.raises(StoreError, match="cut off"):
        await outbox.put("r", 1, b"x")
    with pytest.raises(StoreError):
        await outbox.delivered(3)
