"""The MCP plane: one union over real endpoints, calls that go to the right one, and everything that can break."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from rollcage.environments.fleet import (
    EndpointDown,
    FleetMCPTools,
    RemoteEnvironment,
    ToolConflict,
    ToolError,
    ToolFailed,
    ToolNotFound,
    ToolTimeout,
)
from rollcage.errors import UsageError
from rollcage.simulators import FleetRuntime
from support.fleet_stand import opened

pytestmark = pytest.mark.anyio
API = ["list_tickets", "search_tickets", "read_ticket", "assign_ticket", "reply_to_ticket", "resolve_ticket"]


@pytest.fixture
async def env(fleet: FleetRuntime) -> AsyncIterator[RemoteEnvironment]:
    async with opened(fleet, call_timeout_s=20) as environment:
        yield environment


def calls(fleet: FleetRuntime) -> list[str]:
    tools = fleet.instance().tools
    assert tools
    return tools.calls


async def begun(fleet: FleetRuntime, *names: str) -> None:
    """Wait until calls of these tools have arrived, in this order."""
    tools = fleet.instance().tools
    assert tools
    with anyio.fail_after(120):
        while tools.begun != list(names):
            await fleet.faults.wait()


async def test_the_union_has_every_page_of_every_endpoint(env: RemoteEnvironment) -> None:
    listed = await env.tools.list_tools()
    assert [tool["function"]["name"] for tool in listed.tools] == [*API, "computer"] == listed.names
    assert {tool.name: tool.endpoint for tool in listed.offered}["computer"] == "api/v1/mcp"
    assert env.tools.report().status == "whole"


async def test_nothing_of_a_schema_is_lost(env: RemoteEnvironment) -> None:
    listed = await env.tools.list_tools()
    for tool in listed.offered:
        assert tool.openai["function"]["parameters"] == tool.input_schema
    search = next(tool for tool in listed.offered if tool.name == "search_tickets")
    assert search.input_schema["$defs"]["Search"]["properties"]["priority"]["anyOf"][1]["type"] == "array"
    assert search.input_schema["properties"]["limit"]["default"] == 20


async def test_a_call_answers_with_text_structure_and_pictures(env: RemoteEnvironment) -> None:
    ticket = await env.tools.call_tool("read_ticket", {"ticket_id": 101})
    assert ticket.structured["id"] == 101
    assert ticket.endpoint == "mcp"
    assert '"id":101' in ticket.text
    screen = await env.tools.call_tool("computer", {"action": "screenshot"})
    assert screen.content[0]["mimeType"] == "image/png"
    assert screen.text == "[image: image/png]"


async def test_of_two_tools_with_one_name_the_first_endpoint_wins_and_that_is_recorded(fleet: FleetRuntime) -> None:
    fleet.faults.duplicate_tools = True
    async with opened(fleet) as env:
        listed = await env.tools.list_tools()
        assert listed.names == [*API, "computer"]
        assert {tool.endpoint for tool in listed.offered if tool.name in API} == {"mcp"}
        conflicts = env.tools.report().conflicts
        assert [conflict.name for conflict in conflicts] == API
        assert conflicts[0].winner == "mcp"
        assert conflicts[0].others == {"api/v1/mcp": None}


async def test_shared_names_can_be_kept_apart_by_a_prefix(fleet: FleetRuntime) -> None:
    fleet.faults.duplicate_tools = True
    async with opened(fleet, on_conflict="prefix") as env:
        listed = await env.tools.list_tools()
        assert listed.names == [*API, "computer", *(f"api_v1_mcp__{name}" for name in API)]
        result = await env.tools.call_tool("api_v1_mcp__read_ticket", {"ticket_id": 101})
        assert (result.endpoint, result.structured["id"]) == ("api/v1/mcp", 101)
        assert env.tools.report().conflicts[0].others == {"api/v1/mcp": "api_v1_mcp__list_tickets"}


async def test_shared_names_can_be_refused(fleet: FleetRuntime) -> None:
    fleet.faults.duplicate_tools = True
    async with opened(fleet, on_conflict="error") as env:
        with pytest.raises(ToolConflict, match=r"both 'mcp' and 'api/v1/mcp' have a tool 'list_tickets': choose"):
            await env.tools.list_tools()


async def test_an_endpoint_that_was_only_guessed_may_be_absent(fleet: FleetRuntime) -> None:
    fleet.faults.missing = {"api/v1/mcp"}
    async with opened(fleet) as env:
        assert (await env.tools.list_tools()).names == API
        report = env.tools.report()
        assert [endpoint.status for endpoint in report.endpoints] == ["serving", "absent"]
        assert report.status == "whole"


async def test_one_endpoint_down_leaves_the_others_serving_and_is_reported(fleet: FleetRuntime) -> None:
    fleet.faults.refusing = {"mcp"}
    async with opened(fleet) as env:
        assert (await env.tools.list_tools()).names == ["computer"]
        report = env.tools.report()
        assert report.status == "partial"
        assert report.endpoints[0].status == "down"
        assert "HTTP 401" in report.endpoints[0].error
        assert (await env.tools.call_tool("computer", {"action": "cursor_position"})).structured == {"x": 0, "y": 0}
        with pytest.raises(ToolNotFound, match="its tools are unknown, because it is down: mcp") as caught:
            await env.tools.call_tool("read_ticket", {"ticket_id": 101})
        assert caught.value.endpoint == "mcp"
        fleet.faults.refusing = set()
        assert (await env.tools.list_tools()).names == [*API, "computer"]
        assert env.tools.report().status == "whole"


async def test_all_endpoints_down_is_an_error_that_names_each(fleet: FleetRuntime) -> None:
    fleet.faults.missing = {"mcp"}
    fleet.faults.refusing = {"api/v1/mcp"}
    async with opened(fleet) as env:
        with pytest.raises(EndpointDown, match=r"no MCP endpoint answers: 'mcp' .*404.*'api/v1/mcp' .*401.*; check"):
            await env.tools.call_tool("computer", {"action": "wait"})
        assert env.tools.report().status == "down"


async def test_endpoints_that_are_not_up_yet_are_waited_for(fleet: FleetRuntime) -> None:
    fleet.faults.missing = {"mcp", "api/v1/mcp"}
    async with opened(fleet) as env, anyio.create_task_group() as tasks:

        async def come_up() -> None:
            while env.tools.report().endpoints[0].status != "absent":
                await anyio.sleep(0.01)
            fleet.faults.missing = set()

        tasks.start_soon(come_up)
        assert (await env.tools.list_tools()).names == [*API, "computer"]


async def test_endpoints_that_never_come_up_are_given_up(fleet: FleetRuntime) -> None:
    fleet.faults.missing = {"mcp", "api/v1/mcp"}
    async with opened(fleet, connect_timeout_s=0.5) as env:
        with pytest.raises(EndpointDown, match="no MCP endpoint answers"):
            await env.tools.list_tools()


async def test_an_unknown_tool_is_named_with_the_ones_that_are_near(env: RemoteEnvironment) -> None:
    with pytest.raises(ToolNotFound, match=r"no tool 'read_tickets' on 'mcp', 'api/v1/mcp'; did you mean read_ticket"):
        await env.tools.call_tool("read_tickets", {})


async def test_arguments_that_break_the_schema_are_explained(env: RemoteEnvironment) -> None:
    with pytest.raises(ToolFailed, match=r"do not fit its schema: ticket_id: 'x' is not of type 'integer'") as caught:
        await env.tools.call_tool("read_ticket", {"ticket_id": "x"})
    assert caught.value.endpoint == "mcp"
    assert caught.value.result.is_error
    with pytest.raises(ToolFailed, match="'ticket_id' is a required property"):
        await env.tools.call_tool("read_ticket")


async def test_a_tool_that_fails_says_why(env: RemoteEnvironment) -> None:
    with pytest.raises(ToolFailed, match="there is no ticket 1; list_tickets shows them") as caught:
        await env.tools.call_tool("read_ticket", {"ticket_id": 1})
    assert "schema" not in str(caught.value)


async def test_a_tool_that_hangs_ends_at_its_deadline_and_is_told_to_stop(
    fleet: FleetRuntime, env: RemoteEnvironment
) -> None:
    fleet.faults.hanging = {"list_tickets"}
    await env.tools.list_tools()
    with pytest.raises(
        ToolTimeout, match=r"'list_tickets' on endpoint 'mcp' gave no answer within 2 s.*raise timeout_s"
    ):
        await env.tools.call_tool("list_tickets", timeout_s=2)
    tools = fleet.instance().tools
    assert tools
    with anyio.fail_after(120):
        while tools.stopped != ["list_tickets"]:
            await fleet.faults.wait()
    assert (await env.tools.call_tool("read_ticket", {"ticket_id": 101})).structured["id"] == 101
    assert env.tools.report().endpoints[0].connects == 1


async def test_a_call_whose_answer_was_lost_is_not_made_twice(fleet: FleetRuntime, env: RemoteEnvironment) -> None:
    await env.tools.list_tools()
    fleet.faults.drop_answers = 1
    with pytest.raises(EndpointDown, match=r"endpoint 'mcp' .*may have run.*before you call again") as caught:
        await env.tools.call_tool("reply_to_ticket", {"ticket_id": 101, "text": "hello"})
    assert caught.value.may_have_run
    assert calls(fleet) == ["reply_to_ticket"]
    assert (await env.tools.call_tool("reply_to_ticket", {"ticket_id": 101, "text": "again"})).structured == {
        "replies": 2
    }


async def test_a_lost_answer_harms_no_other_call_on_the_session(fleet: FleetRuntime, env: RemoteEnvironment) -> None:
    fleet.faults.held = {"list_tickets"}
    await env.tools.list_tools()
    done: list[str] = []

    async def call(name: str) -> None:
        try:
            await env.tools.call_tool(name, {"ticket_id": 101} if name == "read_ticket" else {})
            done.append(name)
        except EndpointDown:
            done.append("lost")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, "list_tickets")
        tasks.start_soon(call, "list_tickets")
        await begun(fleet, "list_tickets", "list_tickets")
        fleet.faults.drop_answers = 1
        await call("read_ticket")
        fleet.faults.release()
    assert done == ["lost", "list_tickets", "list_tickets"]


async def test_a_lost_answer_is_read_on_where_the_endpoint_numbers_its_events(fleet: FleetRuntime) -> None:
    fleet.faults.resumable = True
    async with opened(fleet) as env:
        await env.tools.list_tools()
        fleet.faults.drop_answers = 1
        result = await env.tools.call_tool("reply_to_ticket", {"ticket_id": 101, "text": "hello"})
        assert result.structured == {"replies": 1}
        assert calls(fleet) == ["reply_to_ticket"]


async def test_a_server_restarted_between_two_calls_is_reconnected_to(
    fleet: FleetRuntime, env: RemoteEnvironment
) -> None:
    await env.tools.call_tool("assign_ticket", {"ticket_id": 101, "assignee": "support"})
    await fleet.instance().restart()
    ticket = await env.tools.call_tool("read_ticket", {"ticket_id": 101})
    assert ticket.structured["assignee"] == "support"
    assert [endpoint.connects for endpoint in env.tools.report().endpoints] == [2, 1]
    assert calls(fleet) == ["assign_ticket", "read_ticket"]


async def test_many_calls_after_a_restart_open_one_session(fleet: FleetRuntime, env: RemoteEnvironment) -> None:
    await env.tools.list_tools()
    await fleet.instance().restart()
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(env.tools.call_tool, "list_tickets")
    assert calls(fleet) == ["list_tickets"] * 8
    assert env.tools.report().endpoints[0].connects == 2


async def test_a_call_waits_for_a_server_that_is_away_for_a_moment(fleet: FleetRuntime, env: RemoteEnvironment) -> None:
    await env.tools.list_tools()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.instance().restart, 0.5)
        while not fleet.instance().away:
            await fleet.faults.wait()
        assert (await env.tools.call_tool("read_ticket", {"ticket_id": 101})).structured["id"] == 101
    assert calls(fleet) == ["read_ticket"]


async def test_an_instance_that_is_lost_ends_the_call_in_time(fleet: FleetRuntime, env: RemoteEnvironment) -> None:
    await env.tools.list_tools()
    await fleet.instance().lose()
    with anyio.fail_after(120), pytest.raises(EndpointDown, match="check that the instance still runs") as caught:
        await env.tools.call_tool("read_ticket", {"ticket_id": 101})
    assert not caught.value.may_have_run


async def test_a_call_in_progress_when_the_instance_dies_is_not_made_twice(
    fleet: FleetRuntime, env: RemoteEnvironment
) -> None:
    fleet.faults.slow_tools = {"list_tickets": 30}
    await env.tools.list_tools()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_restarted_when_busy, fleet)
        with anyio.fail_after(120), pytest.raises(EndpointDown) as caught:
            await env.tools.call_tool("list_tickets")
    assert caught.value.may_have_run


async def _restarted_when_busy(fleet: FleetRuntime) -> None:
    await begun(fleet, "list_tickets")
    await fleet.instance().restart()


async def test_a_cancelled_call_is_told_to_stop_and_leaves_the_others_alone(
    fleet: FleetRuntime, env: RemoteEnvironment
) -> None:
    fleet.faults.hanging = {"resolve_ticket"}
    fleet.faults.held = {"list_tickets"}
    await env.tools.list_tools()
    tools = fleet.instance().tools
    assert tools
    results: list[str] = []

    async def steady() -> None:
        results.append((await env.tools.call_tool("list_tickets", {"limit": 1})).tool)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(steady)
        await begun(fleet, "list_tickets")
        async with anyio.create_task_group() as given_up:
            given_up.start_soon(env.tools.call_tool, "resolve_ticket", {"ticket_id": 101})
            await begun(fleet, "list_tickets", "resolve_ticket")
            given_up.cancel_scope.cancel()
        fleet.faults.release()
    assert results == ["list_tickets"]
    with anyio.fail_after(120):
        while tools.stopped != ["resolve_ticket"]:
            await fleet.faults.wait()
    assert env.tools.report().endpoints[0].connects == 1


async def test_sixty_four_calls_share_one_session(fleet: FleetRuntime, env: RemoteEnvironment) -> None:
    seen: list[int] = []

    async def read(ticket: int) -> None:
        seen.append((await env.tools.call_tool("read_ticket", {"ticket_id": ticket})).structured["id"])

    async with anyio.create_task_group() as tasks:
        for n in range(64):
            tasks.start_soon(read, 101 + n % 12)
    assert sorted(seen) == sorted(101 + n % 12 for n in range(64))
    assert env.tools.report().endpoints[0].connects == 1


async def test_endpoints_can_be_given_and_named(fleet: FleetRuntime, env: RemoteEnvironment) -> None:
    address = f"{fleet.instance().root}mcp"
    async with FleetMCPTools(fleet.key, {"desk": address}) as tools:
        assert (await tools.list_tools()).names == API
        assert tools.report().endpoints[0].name == "desk"
    async with FleetMCPTools(api_key=fleet.key, mcp_urls=(address,)) as tools:
        assert (await tools.call_tool("read_ticket", {"ticket_id": 101})).endpoint == "mcp"


async def test_a_given_endpoint_that_is_missing_is_down_and_not_absent(
    fleet: FleetRuntime, env: RemoteEnvironment
) -> None:
    root = fleet.instance().root
    async with FleetMCPTools(fleet.key, {"desk": f"{root}mcp", "other": f"{root}elsewhere"}) as tools:
        assert (await tools.list_tools()).names == API
        assert tools.report().status == "partial"


async def test_a_wrong_key_is_said_to_be_wrong(fleet: FleetRuntime, env: RemoteEnvironment) -> None:
    async with FleetMCPTools("wrong", [f"{fleet.instance().root}mcp"]) as tools:
        with pytest.raises(EndpointDown, match=r"HTTP 401.*check FLEET_API_KEY") as caught:
            await tools.list_tools()
        assert caught.value.endpoint == "mcp"
        assert "wrong" not in str(caught.value) + repr(tools.report())


def test_another_event_loop_starts_afresh() -> None:
    async def main() -> None:
        async with FleetRuntime() as fleet, opened(fleet) as env:
            tools = FleetMCPTools(fleet.key, [f"{fleet.instance().root}mcp"])
            assert (await tools.list_tools()).names == API
            again = await anyio.to_thread.run_sync(anyio.run, _names, tools)
            assert again == API
            assert (await env.tools.list_tools()).names

    anyio.run(main)


async def _names(tools: FleetMCPTools) -> list[str]:
    try:
        return (await tools.list_tools()).names
    finally:
        await tools.close()


@pytest.mark.parametrize("urls", [(), ["ftp://host/mcp"], ["mcp"], ["http://"]])
def test_addresses_that_are_none_are_refused_at_once(urls: list[str]) -> None:
    with pytest.raises(UsageError, match="endpoints: "):
        FleetMCPTools("key", urls)


async def test_arguments_of_a_wrong_kind_are_refused_before_anything_is_sent(env: RemoteEnvironment) -> None:
    with pytest.raises(UsageError, match="arguments: an object is needed, not list"):
        await env.tools.call_tool("read_ticket", [1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout_s"):
        await env.tools.call_tool("read_ticket", {}, timeout_s=0)
    with pytest.raises(UsageError, match="name"):
        await env.tools.call_tool("")


async def test_the_agents_handle_reaches_no_reset(env: RemoteEnvironment) -> None:
    await env.tools.list_tools()
    for name in ("reset", "step", "state", "close"):
        with pytest.raises(ToolError):
            await env.tools.call_tool(name, {})
    assert not {"reset", "step", "state"} & set(dir(env.tools))
