"""The published client of a Fleet, on our own: the walkthrough, a running instance, verifiers, use after close."""

from __future__ import annotations

import re
import sys

import anyio
import httpx
import pytest

from rollcage.environments.fleet import EndpointDown, FleetEnvClient, FleetError, FleetMCPTools, InstanceLost
from rollcage.errors import UsageError
from rollcage.simulators import FleetRuntime
from support.fleet_stand import KEY, opened
from support.paths import ROOT

in_thread = anyio.to_thread.run_sync


async def test_the_example_runs_the_walkthrough_and_the_docs_show_what_it_prints() -> None:
    command = [sys.executable, str(ROOT / "examples/fleet_env_example.py"), KEY, "--local"]
    first, second = [(await anyio.run_process(command)).stdout.decode() for _ in range(2)]
    assert first == second, "the same seed, the same output"
    other = (await anyio.run_process([*command, "--seed", "8"])).stdout.decode()
    assert other != first
    shown = re.search(r"fleet_env_example\.py ticket-desk --local\n```\n```\n(.*?)```", _page(), re.DOTALL)
    assert shown is not None and shown[1] == first


def _page() -> str:
    return (ROOT / "docs/fleet.md").read_text()


async def test_the_published_door_asks_for_the_published_image(fleet: FleetRuntime) -> None:
    def asked(**more: str | None) -> str | None:
        with FleetEnvClient.from_fleet(fleet.key, KEY, base_url=fleet.base_url, **more)[0]:
            kind: str | None = fleet.instance().asked.get("image_type")
            return kind

    assert await in_thread(asked) == "mcp"
    assert await in_thread(lambda: asked(image_type=None)) is None
    async with opened(fleet):
        assert fleet.instance().asked.get("image_type") is None


async def test_results_have_the_names_of_mcp(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        result = await env.tools.call_tool("list_tickets", {"limit": 1})
    assert result.structuredContent == result.structured and len(result.structured["tickets"]) == 1
    assert result.content[0]["type"] == "text" and result.isError is False


async def test_an_instance_that_runs_already_is_used_by_its_address_and_left_running(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {fleet.key}"}) as http:
            token = (await http.get(f"{fleet.base_url}/v1/runner-auth/token")).json()["token"]
        manager = env.sdk.urls.manager.api
        headers = {"X-Runner-Token": token, "Authorization": f"Bearer {fleet.key}"}

        def use() -> FleetMCPTools:
            orch = FleetEnvClient(base_url=manager, default_headers=headers)
            with orch:
                assert orch.reset(seed=7).observation.metadata == {}
                assert orch.verify("def verify(before, after):\n    return 0.5") == 0.5
            with pytest.raises(FleetError, match="this client is closed"):
                orch.reset()
            return orch.tools

        tools = await in_thread(use)
        async with tools:
            assert "list_tickets" in (await tools.list_tools()).names
        assert len(fleet.running) == 1, "closing the client leaves it running"
    with pytest.raises(UsageError, match="base_url"):
        await in_thread(lambda: FleetEnvClient(base_url="desk"))


@pytest.mark.parametrize(
    "source",
    [
        "def verify(before, after):\n    return 1.0",
        "def verify(before, after, answer=None):\n    return 1.0 if answer is None else 0.0",
        "def verify(before, after, answer):\n    return 1.0 if answer is None else 0.0",
        "def verify(*data):\n    return float(len(data) == 3)",
    ],
)
async def test_a_verifier_takes_before_and_after_and_an_answer_if_it_likes(fleet: FleetRuntime, source: str) -> None:
    async with opened(fleet) as env:
        assert await env.verify(source) == 1.0


async def test_use_after_close_says_so_in_words(fleet: FleetRuntime) -> None:
    def provision() -> tuple[FleetEnvClient, FleetMCPTools]:
        return FleetEnvClient.from_fleet(fleet.key, KEY, base_url=fleet.base_url)

    orch, tools = await in_thread(provision)
    await in_thread(orch.close)
    for use in (orch.reset, orch.state, lambda: orch.step({}), lambda: orch.verify("")):
        with pytest.raises(FleetError, match=r"ticket-desk.*this client is closed; make another one"):
            await in_thread(use)
    for call in (tools.list_tools, lambda: tools.call_tool("list_tickets")):
        with pytest.raises(EndpointDown, match="gone with their instance: it was released"):
            await call()
    async with opened(fleet) as env:
        pass
    with pytest.raises(InstanceLost, match="it was released"):
        await env.reset()
