"""The published Fleet walkthrough: provision, reset, list the tools, call two of them, release.

    python examples/fleet_env_example.py ENV_KEY               # needs FLEET_API_KEY
    python examples/fleet_env_example.py ticket-desk --local   # a Fleet on this machine: no key, no account

The same seed gives the same output.
"""

import argparse
import asyncio
import sys
from contextlib import ExitStack

from anyio.from_thread import start_blocking_portal

from rollcage.environments.fleet import FleetEnvClient, FleetMCPTools, ToolError
from rollcage.errors import RollcageError


async def agent(tools: FleetMCPTools) -> None:
    """Holds the tools and nothing else: there is no way from here to reset."""
    listed = await tools.list_tools()
    print(f"Agent: {len(listed.tools)} tools:")
    for tool in listed.offered:
        print(f"  {tool.name} (from {tool.endpoint})")
    if "computer" in listed.names:
        seen = await tools.call_tool("computer", {"action": "screenshot"})
        print(f"Agent: computer -> {[block['type'] for block in seen.content]}")
    # The first tool that reads and needs no arguments.
    for tool in listed.offered:
        if tool.name.startswith(("list", "get", "read", "search")) and not tool.input_schema.get("required"):
            try:
                answer = await tools.call_tool(tool.name, {})
            except ToolError as error:
                print(f"Agent: {tool.name} -> {error}")
                continue
            print(f"Agent: {tool.name} -> {answer.structuredContent or answer.text}"[:400])
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env_key", help="the environment, as `rollcage fleet ls` names it")
    parser.add_argument("--local", action="store_true", help="on a Fleet of our own, on this machine")
    parser.add_argument("--seed", type=int, default=7)
    chosen = parser.parse_args()
    with ExitStack() as stack:
        where = {}  # the key is FLEET_API_KEY
        if chosen.local:
            from rollcage.simulators.fleet import FleetRuntime

            portal = stack.enter_context(start_blocking_portal())
            fleet = stack.enter_context(portal.wrap_async_context_manager(FleetRuntime()))
            where = {"api_key": fleet.key, "base_url": fleet.base_url}
        print(f"Provisioning {chosen.env_key}...")
        orch, tools = FleetEnvClient.from_fleet(env_key=chosen.env_key, ttl_seconds=600, **where)
        with orch:
            first = orch.reset(seed=chosen.seed)
            print(f"Orchestrator: reset with seed {chosen.seed}; observation keys: {list(first.observation.metadata)}")
            asyncio.run(agent(tools))
        print("Released.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RollcageError as error:
        sys.exit(f"fleet_env_example: {error}")
