"""The tools of plain MCP servers: the same client as for a Fleet, without a word of Fleet's."""

from __future__ import annotations

import pytest

from rollcage.errors import EnvironmentFailed, EnvironmentLost
from rollcage.mcp.errors import EndpointDown
from rollcage.mcp.tools import McpTools
from rollcage.simulators import FleetRuntime
from support.fleet_stand import opened

pytestmark = pytest.mark.anyio


async def test_a_plain_server_is_called_and_its_refusals_say_nothing_of_a_fleet() -> None:
    async with FleetRuntime() as fleet, opened(fleet):
        address = f"{fleet.instance().root}mcp"
        async with McpTools({"desk": address}, api_key=fleet.key) as tools:
            result = await tools.call_tool("read_ticket", {"ticket_id": 101})
            assert (result.endpoint, result.structured["id"]) == ("desk", 101)
        async with McpTools({"desk": address}, api_key="wrong") as tools:
            with pytest.raises(EndpointDown, match="check the key") as refused:
                await tools.list_tools()
        await fleet.instance().lose()
        async with McpTools([address]) as tools:
            with pytest.raises(EndpointDown, match="check that the server still runs") as down:
                await tools.list_tools()
    for caught in (refused.value, down.value):
        assert "fleet" not in str(caught).lower()
        assert isinstance(caught, EnvironmentFailed)
        assert isinstance(caught, EnvironmentLost)
