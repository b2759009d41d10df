"""The typed client of the environment: every tool as a method, with typed answers. Async; `.sync()` for the rest."""

from __future__ import annotations

import json
from typing import Any, Self, TypeVar, Unpack

from openenv.core.client_types import StepResult
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation
from openenv.core.mcp_client import MCPToolClient

from opencode_env.models import OpenCodeState, RolloutArguments, RolloutResult
from rollcage.schema.views import Aborted, EventPage, Messages, RolloutState, Started
from rollcage.types import Value

V = TypeVar("V", bound=Value)

WAIT_S = 2 * 3600.0
"""How long the client waits for an answer. A server that dies is noticed long before, by pings."""


class ToolCallFailed(RuntimeError):
    """A tool call came to nothing; `error_type` is OpenEnv's word for why."""

    def __init__(self, tool: str, message: str, error_type: str) -> None:
        super().__init__(f"Tool '{tool}' failed: {message} (type: {error_type})")
        self.tool, self.message, self.error_type = tool, message, error_type


class OpenCodeEnv(MCPToolClient):
    """A session with a rollcage server.

    ```python
    async with OpenCodeEnv(base_url="http://127.0.0.1:8000") as env:
        await env.reset()
        result = await env.run_rollout(instruction="Fix the tests", endpoint="vllm", verify=["pytest -q"])
        print(result.reward, len(result.proxy_turns))
    ```

    `api_key`: the server's key, where it asks for one.
    """

    def __init__(self, base_url: str, *args: Any, api_key: str = "", **options: Any) -> None:
        if api_key:
            options["headers"] = {"Authorization": f"Bearer {api_key}", **(options.get("headers") or {})}
        if len(args) < 2:  # connect_timeout_s, message_timeout_s
            options.setdefault("message_timeout_s", WAIT_S)
        super().__init__(base_url, *args, **options)

    def __enter__(self) -> Any:
        """Connect, for sync callers: in a plain `with` every method gives its answer, as `.sync()` does."""
        super().__enter__()
        return self.sync()

    async def __aenter__(self) -> Self:
        """Connect; the session ends with the block."""
        await super().__aenter__()
        return self

    async def run_rollout(self, instruction: str, **arguments: Unpack[RolloutArguments]) -> RolloutResult:
        """Run one rollout to its end."""
        return await self._ask(RolloutResult, "run_rollout", instruction=instruction, **arguments)

    async def start_rollout(self, instruction: str, **arguments: Unpack[RolloutArguments]) -> Started:
        """Start a rollout and return at once."""
        return await self._ask(Started, "start_rollout", instruction=instruction, **arguments)

    async def get_state(self, rollout_id: str) -> RolloutState:
        """Where a rollout is; `status` is `unknown` where there is none of that id."""
        return await self._ask(RolloutState, "get_state", rollout_id=rollout_id)

    async def get_messages(self, rollout_id: str) -> Messages:
        """The agent's own transcript so far."""
        return await self._ask(Messages, "get_messages", rollout_id=rollout_id)

    async def subscribe_events(self, rollout_id: str, after: int = 0) -> EventPage:
        """A page of a rollout's events, and where they stream."""
        return await self._ask(EventPage, "subscribe_events", rollout_id=rollout_id, after=after)

    async def abort_rollout(self, rollout_id: str) -> Aborted:
        """Stop a rollout."""
        return await self._ask(Aborted, "abort_rollout", rollout_id=rollout_id)

    async def finalize_rollout(self, rollout_id: str, wait_s: float = 300) -> RolloutResult:
        """Wait for the end of a rollout; `outcome` is None where it still runs."""
        return await self._ask(RolloutResult, "finalize_rollout", rollout_id=rollout_id, wait_s=wait_s)

    async def call_tool(self, name: str, **kwargs: Any) -> Any:
        """Call a tool as a step of the episode, so that its state counts it; the tool's answer as plain data."""
        step: StepResult[Observation] = await self._step_async(CallToolAction(tool_name=name, arguments=kwargs))
        observed = step.observation
        if not isinstance(observed, CallToolObservation):
            raise ToolCallFailed(name, str(observed.metadata.get("error", "no answer")), "execution_error")
        if observed.error is not None:
            raise ToolCallFailed(name, observed.error.message, observed.error.error_type.value)
        result = observed.result
        return result["data"] if isinstance(result, dict) and "data" in result else result

    async def _ask(self, kind: type[V], tool: str, **arguments: Any) -> V:
        data = json.loads(_extract_text(await self.call_tool(tool, **arguments)))
        # A newer server may say more than this client knows.
        return kind.model_validate({name: value for name, value in data.items() if name in kind.model_fields})

    def _parse_state(self, payload: dict[str, Any]) -> OpenCodeState:
        return OpenCodeState.model_validate(payload)


def _extract_text(result: Any) -> str:
    """The JSON text of a tool's answer, for code that parses it itself: `RolloutResult.model_validate_json(...)`.

    Takes the answer as `call_tool` gives it, or any of the wrappings it may come in: an observation, an MCP result.
    """
    inner = _part(result, "result")
    if not isinstance(result, str) and inner is not None and _part(inner, "content"):
        return _extract_text(inner)
    match _part(result, "content"):
        case [first, *_] if isinstance(text := _part(first, "text"), str):
            return text
    return result if isinstance(result, str) else json.dumps(result, default=str)


def _part(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, dict) else getattr(of, name, None)
