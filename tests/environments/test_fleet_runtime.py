"""The local Fleet is one for the unmodified SDK: its plain and its async half drive it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import anyio
import httpx
import pytest

from rollcage.errors import UsageError
from rollcage.simulators import FleetRuntime
from rollcage.simulators.fleet import VERIFIER

# The SDK is written for an older pydantic.
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
async def fleet() -> AsyncIterator[FleetRuntime]:
    async with FleetRuntime() as runtime:  # whose instances its own end stops: these tests leave some
        yield runtime


@pytest.fixture
async def sdk(fleet: FleetRuntime) -> AsyncIterator[Any]:
    async with httpx.AsyncClient(timeout=120) as http:
        yield import_module("fleet").AsyncFleet(api_key=fleet.key, base_url=fleet.base_url, httpx_client=http)


async def test_the_sdk_finds_environments_regions_and_account(fleet: FleetRuntime, sdk: Any) -> None:
    assert [one.env_key for one in await sdk.list_envs()] == ["ticket-desk", "ticket-desk-eu"]
    assert (await sdk.environment("ticket-desk")).default_version == "v1.1.0"
    assert await sdk.list_regions() == ["local"]
    assert (await sdk.account()).instance_count == 0


async def test_the_sdk_makes_resets_queries_verifies_and_closes(fleet: FleetRuntime, sdk: Any) -> None:
    env = await sdk.make("ticket-desk", run_id="mine")
    assert (await env.reset(seed=5)).success
    assert (await env.instance.manager_health_check()).status == "healthy"
    await env.instance.load()
    database = env.db("current")
    assert {table.name for table in (await database.describe()).tables} == {"customers", "tickets", "replies"}
    found = await database.query("SELECT count(*) FROM tickets")
    assert found.rows == [[12]]
    assert not (await database.query("DELETE FROM tickets")).success
    assert (await database.exec("UPDATE tickets SET status = 'resolved'")).rows_affected == 12
    assert (await env.verify_raw(VERIFIER)).result == 0.0
    assert (await env.heartbeat()).success
    assert [one.instance_id for one in await sdk.instances(run_id="mine")] == [env.instance_id]
    assert await sdk.instances(run_id="other") == []
    assert (await env.close()).status == "stopped"
    assert fleet.running == []


async def test_a_run_is_closed_as_a_whole(fleet: FleetRuntime, sdk: Any) -> None:
    await sdk.make("ticket-desk", run_id="mine")
    await sdk.make("ticket-desk-eu", run_id="mine")
    kept = await sdk.make("ticket-desk", run_id="other")
    assert len(await sdk.close_all(run_id="mine")) == 2
    assert [one.id for one in fleet.running] == [kept.instance_id]


async def test_the_sdks_plain_half_works_too(fleet: FleetRuntime) -> None:
    def work() -> str:
        with httpx.Client(timeout=120) as http:
            plain = import_module("fleet").Fleet(api_key=fleet.key, base_url=fleet.base_url, httpx_client=http)
            env = plain.make("ticket-desk")
            assert env.reset(seed=1).success
            return str(env.close().status)

    assert await anyio.to_thread.run_sync(work) == "stopped"


async def test_the_manager_hides_from_who_lacks_the_runner_token(fleet: FleetRuntime, sdk: Any) -> None:
    env = await sdk.make("ticket-desk")
    async with httpx.AsyncClient(timeout=120) as http:
        bearer = {"authorization": f"Bearer {fleet.key}"}
        assert (await http.post(f"{env.urls.manager.api}/reset", json={}, headers=bearer)).status_code == 404
        assert (await http.get(f"{env.urls.root}mcp")).status_code == 401


async def test_instances_are_apart_from_each_other(fleet: FleetRuntime, sdk: Any) -> None:
    first, second = await sdk.make("ticket-desk"), await sdk.make("ticket-desk")
    await first.instance.load()
    await second.instance.load()
    await first.db("current").exec("DELETE FROM tickets")
    assert (await second.db("current").query("SELECT count(*) FROM tickets")).rows == [[12]]


def test_it_must_run_before_it_has_an_address() -> None:
    with pytest.raises(UsageError, match="async with FleetRuntime"):
        FleetRuntime().base_url  # noqa: B018
