"""Remote environments over HTTP: what there is, its tools, calls on an instance of one's own, and rollouts on it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx
import pytest

from rollcage.errors import EnvironmentFailed, QueueFull
from rollcage.server.auth import Caller
from rollcage.server.environments import RemoteEnvironments
from rollcage.server.service import Service
from rollcage.settings import FleetSettings, Settings
from rollcage.simulators import FleetRuntime
from rollcage.simulators.fleet.task import desk_task
from support.remote_work import Greeter, mcp_server
from support.served import served

pytestmark = pytest.mark.anyio

DESK = "fleet:ticket-desk"


def desk_request(**more: object) -> dict[str, object]:
    task = desk_task(prefix="")
    return {
        "instruction": task.instruction,
        "verifier": task.verifier,
        "environment_seed": task.environment_seed,
        "solution": [turn.model_dump(mode="json") for turn in task.solution],
        "endpoint": "scripted",
        "agent": "loop",
        **more,
    }


@pytest.fixture
async def environments(fleet: FleetRuntime, tmp_path: Path) -> AsyncIterator[RemoteEnvironments]:
    said = FleetSettings.model_validate({"api_key": fleet.key, "base_url": fleet.base_url})
    settings = Settings(home=tmp_path, fleet=said)
    async with Service.open(settings, environments={"desk": DESK}) as service:
        yield service.environments


async def test_tools_are_listed_and_called_on_an_instance_that_lasts_and_rollouts_run_there(tmp_path: Path) -> None:
    async with mcp_server(Greeter()) as url:
        options = ("--fleet-demo", "--environment", f"greeter=mcp:{url}", "--environment", f"desk={DESK}")
        async with served(tmp_path / "home", *options) as server, server.http() as http:
            listed = (await http.get("/environments")).json()
            assert listed["problem"] == ""
            assert [one["name"] for one in listed["environments"]] == ["greeter", "desk", DESK, f"{DESK}-eu"]
            tools = (await http.get("/environments/desk/tools")).json()
            schemas = {tool["name"]: tool["input_schema"] for tool in tools["tools"]}
            assert schemas["read_ticket"]["properties"]["ticket_id"]["type"] == "integer"
            assert tools["title"] == "ticket-desk:v1.1.0"
            called = await http.post("/environments/desk/tools/resolve_ticket", json={"ticket_id": 101})
            assert called.json()["structured"]["status"] == "resolved"
            again = (await http.post("/environments/desk/tools/read_ticket", json={"ticket_id": 101})).json()
            assert again["structured"]["status"] == "resolved", "the same instance"
            assert (again["is_error"], again["text"]) == (False, again["content"][0]["text"])
            wrong = (await http.post("/environments/desk/tools/read_ticket", json={"ticket_id": "x"})).json()
            assert wrong["is_error"]
            assert (await http.delete("/environments/desk")).json() == {"name": "desk", "released": True}
            assert (await http.delete("/environments/desk")).json()["released"] is False
            fresh = (await http.post("/environments/desk/tools/read_ticket", json={"ticket_id": 101})).json()
            assert fresh["structured"]["status"] != "resolved", "a new one, from its start"
            hello = (await http.post("/environments/greeter/tools/greet", json={"name": "Ada"})).json()
            assert hello["text"] == "Hello Ada."
            await _refusals(http)
            started = (await http.post("/rollouts", json=desk_request(environment="desk"))).json()
            result = (await http.get(f"/rollouts/{started['rollout_id']}/result?wait_s=60")).json()
            assert (result["outcome"], result["reward"]) == ("finished", 1.0), result["error"]
            theirs = desk_request(environment=DESK, verifier="def verify(*_): return open('/etc/hostname').read()")
            started = (await http.post("/rollouts", json=theirs)).json()
            result = (await http.get(f"/rollouts/{started['rollout_id']}/result?wait_s=60")).json()
            assert (result["outcome"], result["reward"]) == ("verify_failed", None)
            assert "none but its own verifiers" in result["error"]


async def _refusals(http: httpx.AsyncClient) -> None:
    async def said(method: str, path: str, **more: object) -> tuple[int, str]:
        answer = await http.request(method, path, **more)  # type: ignore[arg-type]
        return answer.status_code, answer.json()["error_code"]

    assert await said("GET", "/environments/nowhere/tools") == (404, "unknown_environment")
    assert await said("GET", "/environments/mcp:http:%2F%2F127.0.0.1/tools") in [
        (404, "unknown_environment"),
        (404, "not_found"),
    ]
    assert await said("DELETE", "/environments/nowhere") == (404, "unknown_environment")
    assert await said("POST", "/environments/desk/tools/reset", json={}) == (422, "bad_argument")
    assert await said("POST", "/environments/desk/tools/read_ticket", json=[1]) == (422, "bad_argument")
    assert await said("GET", "/environments/fleet:nothing/tools") == (502, "environment_failed")
    refused = await http.post("/rollouts", json=desk_request(environment="mcp:http://127.0.0.1:1/mcp"))
    assert (refused.status_code, refused.json()["argument"]) == (422, "environment")
    assert "it offers desk, greeter, fleet:KEY" in refused.json()["error"]


async def test_without_environments_the_list_is_empty_and_naming_one_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path / "home", environment={"FLEET_API_KEY": ""}) as server, server.http() as http:
        assert (await http.get("/environments")).json() == {"environments": [], "problem": ""}
        refused = await http.post("/rollouts", json=desk_request(environment=DESK))
        assert (refused.status_code, refused.json()["argument"]) == (422, "environment")
        assert refused.json()["error"].startswith("environment: this server offers no")


async def test_each_caller_has_an_instance_of_its_own_and_not_too_many(
    environments: RemoteEnvironments, fleet: FleetRuntime
) -> None:
    ada, bela = Caller(name="ada"), Caller(name="bela")
    mine = await environments.tools("desk", ada)
    theirs = await environments.tools("desk", bela)
    assert mine.instance_id != theirs.instance_id
    assert (await environments.tools("desk", ada)).instance_id == mine.instance_id
    assert len(fleet.running) == 2
    assert await environments.release("desk", ada)
    assert len(fleet.running) == 1, "released when the answer says so"
    fleet.faults.boot_s = 600
    async with anyio.create_task_group() as tasks:
        for version in ("1.0.0", "1.1.0"):
            for key in ("ticket-desk", "ticket-desk-eu"):
                tasks.start_soon(environments.tools, f"fleet:{key}:{version}", ada)
        while fleet.creations < 6:
            await anyio.sleep(0.02)
        with pytest.raises(QueueFull, match="are the most"):
            await environments.tools("desk", ada)
        tasks.cancel_scope.cancel()


async def test_an_instance_that_nobody_uses_is_released(environments: RemoteEnvironments, fleet: FleetRuntime) -> None:
    environments.idle_s = 0.5
    await environments.tools("desk", Caller())
    assert len(fleet.running) == 1
    with anyio.fail_after(120):
        while fleet.running:
            await anyio.sleep(0.05)
    assert (await environments.tools("desk", Caller())).instance_id == "local-2", "and the next call gets another"


async def test_the_time_an_instance_takes_to_come_up_is_no_idle_time(
    environments: RemoteEnvironments, fleet: FleetRuntime
) -> None:
    fleet.faults.boot_s = 1.0
    began = time.monotonic()
    await environments.tools("desk", Caller())
    (instance,) = environments._instances.values()
    assert instance.used >= began + 1.0


async def test_a_call_ends_when_its_instance_is_released(environments: RemoteEnvironments, fleet: FleetRuntime) -> None:
    fleet.faults.hanging.add("list_tickets")
    await environments.tools("desk", Caller())
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(EnvironmentFailed, match="released meanwhile; the call may have run"):
                await environments.call("desk", "list_tickets", {}, Caller())

        tasks.start_soon(call)
        await fleet.faults.wait()
        assert await environments.release("desk", Caller())
    assert fleet.running == []


async def test_one_that_fails_says_why_and_can_be_tried_again(
    environments: RemoteEnvironments, fleet: FleetRuntime
) -> None:
    fleet.faults.reset_refused["ticket-desk"] = "not today"
    with pytest.raises(EnvironmentFailed, match="not today"):
        await environments.tools("desk", Caller())
    fleet.faults.reset_refused.clear()
    assert (await environments.tools("desk", Caller())).tools
    await fleet.instance().lose()
    with pytest.raises(EnvironmentFailed, match="desk does not answer") as told:
        await environments.call("desk", "list_tickets", {}, Caller())
    assert "127.0.0.1" not in str(told.value)
