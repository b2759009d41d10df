"""A plain tool-calling loop in this process: for remote environments that need no box.

It asks the model, calls the tools it names, and asks again until it names none. Model and tools are reached the way
every agent reaches them, through what the gateway and the environment lend it, so the log is the same.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Any

from rollcage.agent_events import AgentEvent, AgentReportedError, AgentText, AgentToolCall
from rollcage.agents.base import AgentContext, AgentExit, BareAgent, Emit
from rollcage.agents.fields import table
from rollcage.errors import AgentError
from rollcage.events import AgentEmitted, AgentStarted
from rollcage.json_safe import json_safe
from rollcage.sandboxes.base import InProcessSandbox, Sandbox
from rollcage.types import AgentSpec, JsonObject

if TYPE_CHECKING:
    import httpx

MOST_TOOLS = 128
"""Tool calls in one answer; what a model asks for beyond that is refused."""
LONGEST = 100_000
"""Characters of a tool's answer that the model is told."""


class Loop(BareAgent):
    """The agent `loop`. It works in this process, so there is no box: nothing it does can touch a file."""

    name = "loop"
    wire = "chat"
    in_process = True
    accepts = ("system_prompt", "enabled_tools", "disabled_tools")

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Go round until the model calls no more tools, or a call to it fails."""
        import httpx

        await emit(AgentStarted(agent=self.name, version=self.version))
        if not isinstance(box, InProcessSandbox):
            raise AgentError("the agent loop works in this process; its model and tools are not to be had in a box")
        timeout = httpx.Timeout(None, connect=10)
        async with (
            _client(box.socket_path(_port(context.model.base_url)), timeout) as model,
            _client(box.socket_path(_port(context.tools_url)), timeout) as tools,
        ):
            return await _Conversation(context, spec, emit, model, tools).run(instruction)


class _Conversation:
    def __init__(
        self, context: AgentContext, spec: AgentSpec, emit: Emit, model: httpx.AsyncClient, tools: httpx.AsyncClient
    ) -> None:
        self._context, self._spec, self._emit, self._model, self._tools = context, spec, emit, model, tools
        self._session = f"ses_{secrets.token_hex(8)}"
        self._parts = 0

    async def run(self, instruction: str) -> AgentExit:
        spec = self._spec
        messages: list[JsonObject] = [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []
        messages.append({"role": "user", "content": instruction})
        offered = await self._offered()
        turn = 0
        while True:
            body: JsonObject = {"model": self._context.model.model, "messages": messages}
            message, problem = await self._ask(body | ({"tools": offered} if offered else {}))
            if problem:
                await self._say(AgentReportedError(**self._place(turn), text=problem))
                return AgentExit(code=1, error=problem)
            messages.append(_kept(message))
            if text := message.get("content"):
                await self._say(AgentText(**self._place(turn), text=json_safe(str(text))))
            calls = [call for call in _rows(message.get("tool_calls")) if isinstance(call, dict)]
            if not calls:
                return AgentExit(code=0, error=None)
            names = {tool["function"]["name"] for tool in offered}
            for number, call in enumerate(calls):
                said = await self._call(turn, call, names) if number < MOST_TOOLS else "error: too many calls at once"
                messages.append({"role": "tool", "tool_call_id": str(call.get("id", "")), "content": said})
            turn += 1

    async def _offered(self) -> list[JsonObject]:
        from rollcage.mcp.convert import convert_tool_format

        listed = (await self._rpc("tools/list", {})).get("tools") or []
        wanted, unwanted = self._spec.enabled_tools, self._spec.disabled_tools
        return [
            convert_tool_format(tool, tool["name"])
            for tool in listed
            if (wanted is None or tool["name"] in wanted) and tool["name"] not in unwanted
        ]

    async def _ask(self, body: JsonObject) -> tuple[JsonObject, str]:
        """The model's message, or what went wrong."""
        import httpx

        key = self._context.model.key.get_secret_value()
        headers = {"authorization": f"Bearer {key}", "x-session-id": self._session}
        try:
            response = await self._model.post("/v1/chat/completions", content=_json(body), headers=headers)
        except httpx.HTTPError as error:
            return {}, f"the model's answer broke off: {type(error).__name__}: {error}"
        try:
            answer = table(response.json())
        except (ValueError, RecursionError):
            answer = {}
        if response.status_code != 200:
            said = table(answer.get("error")).get("message") or response.text[:500]
            return {}, f"the model answered with HTTP {response.status_code}: {said}"
        message = table(next(iter(_rows(answer.get("choices"))), None)).get("message")
        if not isinstance(message, dict):
            return {}, "the model's answer holds no message"
        return message, ""

    async def _call(self, turn: int, call: JsonObject, names: set[str]) -> str:
        """Carry one call out; what the model is told of it."""
        function = table(call.get("function"))
        name, written = str(function.get("name", "")), str(function.get("arguments") or "{}")
        failed, began = True, time.monotonic()
        try:
            arguments = json.loads(written, parse_constant=str)
        except (ValueError, RecursionError):
            arguments = None
        if name not in names:
            said = f"error: there is no tool {name[:200]!r}"
        elif not isinstance(arguments, dict):
            said = "error: the arguments are no JSON object"
        else:
            result = await self._rpc("tools/call", {"name": name, "arguments": arguments})
            said, failed = _told(_text(result)), bool(result.get("isError"))
        await self._say(
            AgentToolCall(
                **self._place(turn),
                call_id=json_safe(str(call.get("id", ""))),
                name=json_safe(name),
                arguments=json_safe(arguments if isinstance(arguments, dict) else {"arguments": written}),
                status="error" if failed else "completed",
                result="" if failed else json_safe(said),
                error=json_safe(said) if failed else "",
                seconds=time.monotonic() - began,
            )
        )
        return said

    async def _rpc(self, method: str, parameters: JsonObject) -> JsonObject:
        import httpx

        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
        try:
            answer = table((await self._tools.post("/mcp", content=_json(body))).json())
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise AgentError(f"the environment's tools are out of reach: {type(error).__name__}: {error}") from error
        if refused := table(answer.get("error")):
            return {"content": [{"type": "text", "text": str(refused.get("message"))}], "isError": True}
        return table(answer.get("result"))

    def _place(self, turn: int) -> dict[str, str]:
        self._parts += 1
        return {"session": self._session, "message": f"turn {turn}", "id": f"{self._parts:06}"}

    async def _say(self, event: AgentEvent) -> None:
        await self._emit(AgentEmitted(event=event))


def _client(socket_path: str, timeout: httpx.Timeout) -> httpx.AsyncClient:
    import httpx

    transport = httpx.AsyncHTTPTransport(uds=socket_path)
    headers = {"content-type": "application/json"}
    return httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers=headers, timeout=timeout, trust_env=False
    )


def _port(url: str) -> int:
    from urllib.parse import urlsplit

    return urlsplit(url).port or 0


def _kept(message: JsonObject) -> JsonObject:
    """The assistant's message as it goes back to the model: thoughts are dropped, as chat templates do."""
    calls = _rows(message.get("tool_calls"))
    return {"role": "assistant", "content": message.get("content"), **({"tool_calls": calls} if calls else {})}


def _text(result: JsonObject) -> str:
    """What a model reads of a tool's answer."""
    from rollcage.mcp.types import ToolResult

    blocks = [block for block in result.get("content") or [] if isinstance(block, dict)]
    structured = result.get("structuredContent")
    return ToolResult(tool="", endpoint="", content=blocks, structured=structured).text


def _told(text: str) -> str:
    """What the model is told of a long answer: its beginning."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n[{len(text) - LONGEST} characters are left out]"


def _json(body: JsonObject) -> bytes:
    # httpx's own way refuses half characters and NaN, which a model can write and a tool can answer.
    return json.dumps(json_safe(body)).encode()


def _rows(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
