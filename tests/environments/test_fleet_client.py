"""The HTTP plane: provisioning through the official SDK, reset, step, state, verify; every instance is released."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import SecretStr

from rollcage.environments import fleet as fleets
from rollcage.environments.fleet import (
    BootFailed,
    BootTooSlow,
    FleetEnvClient,
    FleetError,
    InstanceLost,
    KeyRefused,
    NotOffered,
    QuotaReached,
    ResetRefused,
    UnknownEnvironment,
    VerifierFailed,
    sdk,
)
from rollcage.errors import UsageError
from rollcage.simulators import FleetRuntime
from rollcage.simulators.fleet import VERIFIER
from support.commands import environ, rest
from support.fleet_stand import KEY, charged_twice, opened

pytestmark = pytest.mark.anyio


async def test_an_environment_is_provisioned_reset_and_released(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        assert env.key == "ticket-desk:v1.1.0"
        assert fleet.instance().id == env.instance_id
        result = await env.reset(seed=7)
        assert (result.observation.metadata, result.message) == ({}, "Environment reset")
        manager = fleet.instance().manager
        assert manager
        assert manager.resets == [7]
    assert fleet.creations == 1


async def test_a_version_can_be_pinned(fleet: FleetRuntime) -> None:
    async with opened(fleet, "ticket-desk:1.0.0", data_key="base", data_version="v2") as env:
        assert env.key == "ticket-desk:v1.0.0"
        assert (fleet.instance().asked["data_key"], fleet.instance().asked["data_version"]) == ("base", "v2")


async def test_reset_restores_the_desk_and_the_seed_decides_what_it_is(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        await env.reset(seed=1)
        before = (await env.tools.call_tool("list_tickets")).text
        await env.tools.call_tool("resolve_ticket", {"ticket_id": 101})
        assert (await env.tools.call_tool("list_tickets")).text != before
        await env.reset(seed=2)
        assert (await env.tools.call_tool("list_tickets")).text != before
        await env.reset(seed=1)
        assert (await env.tools.call_tool("list_tickets")).text == before


async def test_the_verifier_reads_what_was_done(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        await env.reset(seed=3)
        ticket = await charged_twice(env)
        assert await env.verify(VERIFIER) == 0.0
        await env.tools.call_tool("assign_ticket", {"ticket_id": ticket, "assignee": "billing"})
        assert await env.verify(VERIFIER) == pytest.approx(1 / 3, abs=1e-4)
        await env.tools.call_tool("reply_to_ticket", {"ticket_id": ticket, "text": "We refund the second charge."})
        await env.tools.call_tool("resolve_ticket", {"ticket_id": ticket})
        assert await env.verify(VERIFIER) == 1.0
        await env.tools.call_tool("resolve_ticket", {"ticket_id": 101 if ticket != 101 else 102})
        assert await env.verify(VERIFIER) == 0.0


async def test_a_verifier_that_breaks_gives_no_reward_at_all(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        with pytest.raises(VerifierFailed, match="did not run to its end: ZeroDivisionError"):
            await env.verify("def verify(before, after, answer=None):\n    return 1 / 0\n")
        with pytest.raises(VerifierFailed, match="gave 'good', which is no reward"):
            await env.verify("def verify(before, after, answer=None):\n    return 'good'\n")


async def test_step_and_state_work_where_the_instance_has_them(fleet: FleetRuntime) -> None:
    fleet.faults.offers_step = True
    async with opened(fleet) as env:
        await env.reset()
        stepped = await env.step({"look": True})
        assert stepped.observation.metadata["echo"] == {"look": True}
        assert (stepped.reward, stepped.done) == (0.0, False)
        state = await env.state()
        assert (state.episode_id, state.step_count, state.more) == ("episode-1", 1, {"desk": "open"})


async def test_where_there_is_no_step_or_state_that_is_said(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        with pytest.raises(NotOffered, match=r"ticket-desk:v1.1.0 offers no step.*act through its tools"):
            await env.step({"look": True})
        with pytest.raises(NotOffered, match="does not tell its state"):
            await env.state()


async def test_tool_calls_do_not_go_through_step(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        with pytest.raises(UsageError, match=r"go through tools\.call_tool"):
            await env.step({"type": "call_tool", "tool_name": "read_ticket"})


async def test_no_key_is_said_before_anything_is_asked(fleet: FleetRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    with pytest.raises(KeyRefused, match="set FLEET_API_KEY, or try it without one: rollcage fleet demo"):
        async with opened(fleet, api_key=""):
            pass
    assert fleet.unauthorized == 0


async def test_the_key_and_the_address_come_from_the_settings(
    fleet: FleetRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", fleet.key)
    monkeypatch.setenv("FLEET_BASE_URL", fleet.base_url + "/")
    async with fleets.open(KEY) as env:
        assert env.instance_id == fleet.instance().id


async def test_a_wrong_key_is_refused_and_never_shown(fleet: FleetRuntime) -> None:
    with pytest.raises(KeyRefused, match="check FLEET_API_KEY") as caught:
        async with opened(fleet, api_key="wrong-key-of-mine"):
            pass
    assert "wrong-key-of-mine" not in str(caught.value)
    assert fleet.instances == {}


async def test_an_unknown_environment_or_version_is_named(fleet: FleetRuntime) -> None:
    with pytest.raises(UnknownEnvironment, match=r"'desk' not found; rollcage fleet ls shows what there is"):
        async with opened(fleet, "desk"):
            pass
    with pytest.raises(UnknownEnvironment, match="'v9' not found"):
        async with opened(fleet, "ticket-desk:9"):
            pass
    with pytest.raises(UsageError, match="env_key"):
        async with opened(fleet, " "):
            pass


async def test_the_quota_is_told_with_a_way_out(fleet: FleetRuntime) -> None:
    fleet.faults.quota = 1
    async with opened(fleet):
        with pytest.raises(QuotaReached, match=r"1 running instances out of a maximum of 1; end instances"):
            async with fleets.open(KEY, api_key=fleet.key, base_url=fleet.base_url):
                pass
        assert len(fleet.running) == 1


async def test_a_boot_that_is_too_slow_is_given_up_and_undone(fleet: FleetRuntime) -> None:
    fleet.faults.boot_s = 60
    with pytest.raises(BootTooSlow, match=r"did not run within 0\.5 s.*raise boot_timeout_s"):
        async with opened(fleet, boot_timeout_s=0.5):
            pass
    assert [instance.status for instance in fleet.instances.values()] == ["stopped"]


async def test_an_instance_that_still_boots_when_the_service_answers_is_waited_for(fleet: FleetRuntime) -> None:
    fleet.faults.boot_s = 1.2
    async with opened(fleet, service_wait_s=0) as env:
        assert fleet.instance().id == env.instance_id
        assert fleet.instance().status == "running"


async def test_an_instance_of_a_shared_run_that_boots_too_slowly_is_ended_alone(fleet: FleetRuntime) -> None:
    async with fleets.open(KEY, api_key=fleet.key, base_url=fleet.base_url, run_id="ours") as kept:
        fleet.faults.boot_s = 60
        with pytest.raises(BootTooSlow):
            async with fleets.open(
                KEY, api_key=fleet.key, base_url=fleet.base_url, run_id="ours", boot_timeout_s=1.5, service_wait_s=0
            ):
                pass
        assert [instance.id for instance in fleet.running] == [kept.instance_id]


async def test_an_instance_that_fails_to_boot_is_told(fleet: FleetRuntime) -> None:
    fleet.faults.boot_fails = True
    with pytest.raises(BootFailed, match="'error' instead of running; try again"):
        async with opened(fleet):
            pass


async def test_provisioning_is_repeated_where_the_service_says_it_helps(fleet: FleetRuntime) -> None:
    fleet.faults.provisioning = [
        (500, {"message": "no capacity", "retryable": True}),
        (429, "Too many requests"),
        (400, "too many in-flight creations"),
        (503, "unavailable"),
    ]
    async with opened(fleet, retry_wait_s=0.01):
        assert fleet.creations == 5


@pytest.mark.parametrize(
    ("status", "detail"),
    [(500, "broken"), (500, {"message": "no", "retryable": False}), (404, "what?"), (400, "bad"), (502, "gateway")],
)
async def test_provisioning_is_not_repeated_otherwise(fleet: FleetRuntime, status: int, detail: object) -> None:
    fleet.faults.provisioning = [(status, detail)]
    with pytest.raises(FleetError, match="cannot provision ticket-desk"):
        async with opened(fleet, retry_wait_s=0.01):
            pass
    assert fleet.creations == 1


async def test_provisioning_that_never_succeeds_ends(fleet: FleetRuntime) -> None:
    fleet.faults.provisioning = [(429, "Too many requests")] * 9
    with pytest.raises(FleetError, match="wait a little and try again"):
        async with opened(fleet, retry_wait_s=0.01):
            pass
    assert fleet.creations == 5


async def test_a_reset_that_is_refused_names_the_environment_and_a_way_out(fleet: FleetRuntime) -> None:
    fleet.faults.reset_refused = {"ticket-desk-eu": "the data is being migrated"}
    fleet.faults.reset_broken = {"ticket-desk": 500}
    async with opened(fleet, "ticket-desk-eu") as env:
        with pytest.raises(ResetRefused, match=r"ticket-desk-eu:v1.1.0 did not reset .*being migrated.*new instance"):
            await env.reset(seed=1)
    async with opened(fleet) as env:
        with pytest.raises(ResetRefused, match=r"ticket-desk:v1.1.0 did not reset \(HTTP 500\): reset failed"):
            await env.reset(seed=1)


async def test_a_lost_instance_is_told_from_a_missing_operation(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        await fleet.instance().lose()
        with pytest.raises(InstanceLost, match=r"is lost: it is error .*provision another"):
            await env.reset()


async def test_an_unreachable_service_is_told(fleet: FleetRuntime, unused_port: int) -> None:
    with pytest.raises(FleetError, match=r"check the network and FLEET_BASE_URL"):
        async with opened(fleet, base_url=f"http://127.0.0.1:{unused_port}"):
            pass


@pytest.fixture
def unused_port() -> int:
    return 1  # a port of the system that nothing listens on


async def test_heartbeats_keep_an_instance_alive(fleet: FleetRuntime) -> None:
    async with opened(fleet, heartbeat_interval=3) as env:
        instance = fleet.instance()
        with anyio.fail_after(120):
            # They come three times as often as asked for.
            while instance.beats < 5:
                await fleet.faults.wait()
        assert fleet.running == [instance]
        await env.reset()


async def test_an_instance_without_heartbeats_ends_by_itself(fleet: FleetRuntime) -> None:
    async with httpx.AsyncClient(timeout=120) as http:
        await sdk.fleet(SecretStr(fleet.key), fleet.base_url, http).make(KEY, heartbeat_interval=1, timeout=60)
    with anyio.fail_after(120):
        while fleet.running:
            await anyio.sleep(0.05)


async def test_an_error_in_the_block_comes_out_as_it_is_and_releases(fleet: FleetRuntime) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(fleet):
            raise ZeroDivisionError


async def test_cancellation_in_the_middle_of_a_call_releases(fleet: FleetRuntime) -> None:
    fleet.faults.hanging = {"list_tickets"}
    with anyio.CancelScope() as scope:
        async with opened(fleet) as env, anyio.create_task_group() as tasks:
            tasks.start_soon(env.tools.call_tool, "list_tickets")
            tools = fleet.instance().tools
            assert tools
            while not tools.begun:
                await fleet.faults.wait()
            scope.cancel()
    assert scope.cancelled_caught
    assert fleet.running == []


async def test_cancellation_while_the_instance_boots_leaves_none(fleet: FleetRuntime) -> None:
    fleet.faults.boot_s = 60
    with anyio.move_on_after(60) as scope:
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                while not fleet.instances:
                    await anyio.sleep(0.01)
                scope.cancel()

            tasks.start_soon(cancel)
            async with fleets.open(KEY, api_key=fleet.key, base_url=fleet.base_url):
                pass
    assert [instance.status for instance in fleet.instances.values()] == ["stopped"]


async def test_options_that_do_not_exist_are_refused(fleet: FleetRuntime) -> None:
    with pytest.raises(UsageError, match="ttl: no such option; known: base_url, data_key"):
        async with opened(fleet, ttl=3):
            pass
    with pytest.raises(UsageError, match="endpoints: 'desk' is no http address"):
        async with opened(fleet, endpoints={"desk": "desk"}):
            pass
    assert fleet.creations == 0
    with pytest.raises(UsageError, match="on_conflict"):
        async with opened(fleet, on_conflict="last"):
            pass


WALKTHROUGH = """
import asyncio, os, sys
from rollcage.environments.fleet import FleetEnvClient

orch, tools = FleetEnvClient.from_fleet(api_key=os.environ["FLEET_API_KEY"], env_key="ticket-desk", ttl_seconds=600)

async def agent():
    first = orch.reset()
    print("observation keys:", list(first.observation.metadata.keys()))
    listed = await tools.list_tools()
    print("tools:", [tool["function"]["name"] for tool in listed.tools])
    print((await tools.call_tool("computer", {"action": "cursor_position"})).text)

asyncio.run(agent())
{ending}
"""


async def run_script(home: Path, fleet: FleetRuntime, script: str) -> subprocess.CompletedProcess[bytes]:
    env = environ(home, {"FLEET_API_KEY": fleet.key, "FLEET_BASE_URL": fleet.base_url})
    with anyio.fail_after(120):
        return await anyio.run_process([sys.executable, "-c", script], env=env, check=False)


KEPT = "import builtins; builtins.kept = [orch, tools]; sys.exit(3)"  # nothing collects these before the very end


@pytest.mark.parametrize("ending", ["orch.close(); orch.close()", "del orch", KEPT])
async def test_the_published_walkthrough_runs_and_leaves_nothing(
    fleet: FleetRuntime, tmp_path: Path, ending: str
) -> None:
    done = await run_script(tmp_path, fleet, WALKTHROUGH.replace("{ending}", ending))
    assert done.stderr == b""
    assert b"observation keys: []\n" in done.stdout
    assert b"'resolve_ticket', 'computer']" in done.stdout
    assert fleet.creations == 1
    assert fleet.running == []


async def test_ctrl_c_releases_the_instance(fleet: FleetRuntime, tmp_path: Path) -> None:
    script = (
        "import asyncio; from rollcage.environments import fleet\n"
        "async def main():\n"
        "    async with fleet.open('ticket-desk') as env:\n"
        "        await env.tools.call_tool('list_tickets')\n"
        "        print('up', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    env = environ(tmp_path, {"FLEET_API_KEY": fleet.key, "FLEET_BASE_URL": fleet.base_url})
    with anyio.fail_after(120):
        async with await anyio.open_process([sys.executable, "-c", script], env=env) as process:
            assert process.stdout
            assert await process.stdout.receive() == b"up\n"
            assert len(fleet.running) == 1
            os.kill(process.pid, signal.SIGINT)
            code, _, error = await rest(process)
    assert (code, error.strip().splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert fleet.running == []


async def test_the_published_door_refuses_as_clearly(fleet: FleetRuntime) -> None:
    def provision() -> None:
        with pytest.raises(UnknownEnvironment):
            FleetEnvClient.from_fleet(fleet.key, "desk", base_url=fleet.base_url)
        orch, _ = FleetEnvClient.from_fleet(fleet.key, KEY, base_url=fleet.base_url)
        with orch:
            with pytest.raises(NotOffered):
                orch.state()
            with pytest.raises(NotOffered):
                orch.step({"look": 1})
            assert orch.verify(VERIFIER) == 0.0

    await anyio.to_thread.run_sync(provision)
    assert fleet.running == []
