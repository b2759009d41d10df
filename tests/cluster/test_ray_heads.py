"""Heads that die, on a real Ray: the rollcage head is killed and returns; Ray's own head is gone for good."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollcage
from rollcage.events import Requeued
from rollcage.store import Store
from rollcage.types import Blame, Outcome
from support.commands import rollcage as command
from support.processes import alive
from support.raylets import actors_of, raylets
from support.served import Served, served

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1200)]
MARK = "rollcage-ray-head-sleep"
"""What stray processes of a box would be called."""
A_WHILE = f"bash -c 'exec -a {MARK} sleep 25'"
"""Long enough to be killed meanwhile, and to come to its end the next time."""
SLEEP = f"bash -c 'exec -a {MARK} sleep 1000'"


async def until_logged(server: Served, rollout_id: str, kind: str, stage: str = "") -> None:
    async with server.client() as client:
        async for entry in client.follow(rollout_id):
            if entry.event.kind == kind and (not stage or getattr(entry.event, "stage", "") == stage):
                return
    raise AssertionError(f"{rollout_id} ended")


async def start(client: rollcage.Client, script: str, **more: Any) -> str:
    return (await client.start(script, agent="shell", endpoint="scripted", **more)).rollout_id


async def until_none(mark: str) -> None:
    with anyio.fail_after(180):
        while alive(mark):
            await anyio.sleep(0.1)


def options(address: str, home: Path) -> tuple[str, ...]:
    return ("--ray", address, "--ray-resource", "place=1", "--node-home", str(home))


async def test_a_killed_head_takes_its_nodes_along_and_comes_back_to_what_was_open(
    tmp_path: Path, state_dir: Path
) -> None:
    home = tmp_path / "state"
    with raylets(2, places=2) as found:
        async with served(home, *options(found.address, state_dir)) as server, server.client() as client:
            working = await start(client, SLEEP)
            await until_logged(server, working, "agent_started")
            early = await start(client, "touch done", setup=[A_WHILE], verify=["test -f done"])
            await until_logged(server, early, "stage_started", "setup")
            with anyio.fail_after(60):
                while len(alive(MARK)) < 2:
                    await anyio.sleep(0.1)
            nodes = alive("ray::NodeActor") + alive("ray::rollout")
            assert nodes
            server.kill()
        await until_none(MARK)
        with anyio.fail_after(180):
            while set(nodes) & set(alive("ray::")):
                await anyio.sleep(0.1)
        async with served(home, *options(found.address, state_dir)) as server, server.client() as client:
            assert (await client.wait(working)).outcome is Outcome.CRASHED
            assert (await client.wait(await start(client, "true"))).outcome is Outcome.FINISHED
            resumed = await client.wait(early)
            assert (resumed.outcome, resumed.reward) == (Outcome.FINISHED, 1.0), resumed.error
    async with Store.open(home / "rollouts.db") as store:
        assert (await store.rollout(working)).blame is Blame.INFRASTRUCTURE
        for each, again in ((working, 0), (early, 1)):
            log = await store.read(each)
            assert [entry.event.kind for entry in log].count("ended") == 1
            assert sum(isinstance(entry.event, Requeued) for entry in log) == again
    await until_none(MARK)


async def test_rays_own_head_may_die_and_what_runs_goes_on(tmp_path: Path, state_dir: Path) -> None:
    home = tmp_path / "state"
    with raylets(2, places=3) as found:
        async with served(home, *options(found.address, state_dir)) as server, server.client() as client:
            first = await start(client, "sleep 5; touch done", verify=["test -f done"])
            await until_logged(server, first, "agent_started")
            found.head_node.kill_gcs_server()
            second = await start(client, "touch done", verify=["test -f done"])
            for each in (first, second):
                result = await client.wait(each)
                assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), result.error
            held = await start(client, SLEEP)
            await until_logged(server, held, "agent_started")
            # Ray ends what is connected to it a minute later, and the head with it.
            with anyio.fail_after(400):
                await anyio.to_thread.run_sync(server.process.wait, abandon_on_cancel=True)
        await until_none(MARK)
    # The same log, with no Ray at all.
    assert '"crashed"' in command(tmp_path, "show", held, "--json").stdout
    async with Store.open(home / "rollouts.db") as store:
        rollout = await store.rollout(held)
        assert (rollout.outcome, rollout.blame) == (Outcome.CRASHED, Blame.INFRASTRUCTURE)


async def test_a_node_whose_process_is_stopped_is_fenced_by_its_lease(tmp_path: Path, state_dir: Path) -> None:
    home = tmp_path / "state"
    with raylets(2, places=1) as found:
        more = (*options(found.address, state_dir), "--ray-lease", "20")
        async with served(home, *more) as server, server.client() as client:
            rollout_id = await start(client, "touch done", setup=[A_WHILE], verify=["test -f done"])
            with anyio.fail_after(300):
                while not alive(MARK):
                    await anyio.sleep(0.1)
            stopped = alive(f"ray::rollout {rollout_id}") or actors_of(found)
            assert len(stopped) >= 1
            os.kill(stopped[0], signal.SIGSTOP)
            result = await client.wait(rollout_id)
            assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), result.error
        await until_none(MARK)
    async with Store.open(home / "rollouts.db") as store:
        log = await store.read(rollout_id)
    assert sum(isinstance(entry.event, Requeued) for entry in log) == 1
    assert [entry.event.kind for entry in log].count("ended") == 1
