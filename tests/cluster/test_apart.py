"""Nodes that do not have the head's disk: what they need is sent to them, and the agent's work comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import click
import pytest
from pydantic import ValidationError

from rollcage.agents.shell import Shell
from rollcage.agents.stored import StoredWork
from rollcage.cli.nodes import cluster_of
from rollcage.cluster import Cluster
from rollcage.cluster.content import ContentStore
from rollcage.cluster.view import read_view, write_view
from rollcage.events import WorkStored
from rollcage.runner import Registry
from rollcage.runner.reverify import reverify
from rollcage.sandboxes.images import Image, ImageStore
from rollcage.sandboxes.layers import Layer, LayerStore
from rollcage.schema.nodes import NodeView
from rollcage.store import Store
from rollcage.store.work import WorkStore
from rollcage.types import NO_MODEL, AgentSpec, Job, Outcome, Task
from support.cluster import Machines, opened_cluster

pytestmark = pytest.mark.anyio


async def test_the_agents_work_is_kept_by_the_head(store: Store, backends: Registry, tmp_path: Path) -> None:
    machines = Machines(backends, backends.providers["local"], tmp_path)
    machines.add("far")
    task = Task(instruction="head -c 300000 /dev/urandom > done", verify=("test -s done",))
    job = Job(task=task, model=NO_MODEL, agent=AgentSpec(name="shell"))
    far = tmp_path / "far"
    async with opened_cluster(store, backends, machines, tmp_path, node_home=str(far)) as (runner, _):
        rollout_id = await runner.start(job)
        assert (await runner.wait(rollout_id)).outcome is Outcome.FINISHED
    stored = next(e.event for e in await store.read(rollout_id) if isinstance(e.event, WorkStored))
    assert isinstance(backends.work, WorkStore) and stored.digest in backends.work, stored.why_not
    kept = b"".join([chunk async for chunk in backends.work.get(stored.digest)])
    assert len(kept) == stored.size > 300_000 and not (far / "work").exists()


async def test_work_is_judged_again_on_a_node_that_is_sent_it(store: Store, backends: Registry, tmp_path: Path) -> None:
    assert isinstance(backends.work, WorkStore)
    registry = replace(backends, agents={**backends.agents, "stored-work": StoredWork(backends.work.get)})
    machines = Machines(registry, backends.providers["local"], tmp_path)
    task = Task(instruction="echo right > answer", verify=("grep -x right answer",))
    job = Job(task=task, model=NO_MODEL, agent=AgentSpec(name="shell"))
    first = machines.add("first", home=tmp_path / "first")
    async with opened_cluster(store, registry, machines, tmp_path) as (runner, head):
        rollout = await runner.wait(await runner.start(job))
        other = machines.add("other", home=tmp_path / "other")
        while "other" not in head.nodes or head.nodes["other"].state != "ready":
            await anyio.sleep(0.01)
        first.kill()
        while "first" in head.nodes:
            await anyio.sleep(0.01)
        verdict = await reverify(runner, rollout)
    assert rollout.reward == 1.0 and verdict.reward is not None and verdict.reward.total == 1.0, verdict
    assert rollout.work is not None and other.received == [f"work:{rollout.work.digest}"]
    assert [order.job.agent.name for order in other.orders] == ["stored-work"]


async def test_what_rollouts_share_is_packed_once_and_sent_to_each_node_once(
    store: Store, backends: Registry, tmp_path: Path
) -> None:
    async def build(folder: Path) -> None:
        (folder / "tool").write_bytes(b"x" * 100_000)

    class Layered(Shell):
        def layers(self) -> tuple[Layer, ...]:
            return (Layer("tool", "1", build),)

    registry = replace(backends, agents={"shell": Layered()})
    machines = Machines(registry, backends.providers["local"], tmp_path)
    for name in ("a", "b", "c"):
        machines.add(name, places=2, home=tmp_path / name)
    job = Job(task=Task(instruction="true"), model=NO_MODEL, agent=AgentSpec(name="shell"))
    async with opened_cluster(store, registry, machines, tmp_path) as (runner, head):
        while sum(node.state == "ready" for node in head.nodes.values()) < 3:
            await anyio.sleep(0.01)
        ids = [await runner.start(job) for _ in range(12)]
        for each in ids:
            assert (await runner.wait(each)).outcome is Outcome.FINISHED
    layer = (await LayerStore(tmp_path / "layers").ensure(Layer("tool", "1", build))).name
    assert machines.packed == 1, "nodes that ask at the same time get the same archive"
    for machine in machines.all.values():
        assert machine.orders and machine.received == [f"layer:{layer}"]
        assert (machine.home / "layers" / layer / "tool").stat().st_size == 100_000


async def test_layers_images_and_trees_arrive_as_they_are(tmp_path: Path) -> None:
    def content(name: str) -> ContentStore:
        folder = tmp_path / name
        trees, work = WorkStore(folder / "trees", 1 << 20), WorkStore(folder / "work", 1 << 20)
        return ContentStore(ImageStore(folder / "images", LayerStore(folder / "layers")), trees, work)

    async def build(folder: Path) -> None:
        (folder / "bin").mkdir()
        (folder / "bin" / "tool").write_bytes(b"x" * 100_000)
        (folder / "bin" / "tool").chmod(0o755)
        (folder / "link").symlink_to("bin/tool")

    async def chunks() -> AsyncIterator[bytes]:
        yield b"tree"

    head, node = content("head"), content("node")
    layer = await head.layers.ensure(Layer("tool", "1", build))
    head.images.put(Image(name="box", parts=(layer.name,)))
    digest, _ = await WorkStore(tmp_path / "head" / "trees", 1 << 20).put(chunks())
    await WorkStore(tmp_path / "head" / "work", 1 << 20).put(chunks())
    names = [f"layer:{layer.name}", "image:box", f"tree:{digest}", f"work:{digest}"]
    assert node.missing(names) == frozenset(names)
    for name in names:
        await node.receive(name, await head.packed(name))
    assert node.missing(names) == frozenset() and node.images.get("box").parts == (layer.name,)
    there = node.layers.folder / layer.name
    assert (there / "link").read_bytes() == b"x" * 100_000 and (there / "bin" / "tool").stat().st_mode & 0o777 == 0o755


def test_the_word_about_nodes_is_read_and_grows_old(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    assert read_view(tmp_path, 0.0) == ((), 0.0)
    write_view(tmp_path, [NodeView(id="a", address="10.0.0.1", state="ready", places=4)])
    now = (tmp_path / "cluster" / "nodes.json").stat().st_mtime
    assert read_view(tmp_path, now + 2)[0][0].places == 4
    assert read_view(tmp_path, now + 3600)[0] == ()


def test_options_of_the_command_become_a_cluster() -> None:
    given = {"ray": "auto", "ray_places": 8, "ray_resource": ("CPU=0.5", "place=1"), "ray_label": ("pool=agents",)}
    cluster = cluster_of({**given, "ray_lease": None, "ray_autoscale": True, "node_home": None})
    assert cluster is not None and cluster.resources == {"CPU": 0.5, "place": 1.0} and cluster.places == 8
    assert cluster.labels == {"pool": "agents"} and cluster.lease_s == 60.0
    assert cluster.autoscale


@pytest.mark.parametrize("amount", ["-1", "nan", "inf", "much"])
def test_what_is_no_amount_of_a_resource_is_refused(amount: str) -> None:
    given = {"ray": "auto", "ray_places": None, "ray_resource": (f"place={amount}",), "ray_label": ()}
    with pytest.raises(click.UsageError, match=f"--ray-resource: place='{amount}' is no amount"):
        cluster_of({**given, "ray_lease": None, "ray_autoscale": False, "node_home": None})
    if amount != "much":
        with pytest.raises(ValidationError):
            Cluster(resources={"place": float(amount)})
