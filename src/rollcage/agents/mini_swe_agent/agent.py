"""mini-swe-agent, of the SWE-agent team: one tool, bash, and a short prompt; python3 runs it, on the chat wire.

Its loop, prompts, environment and configuration are its own. Its model class is the one of its package that needs only
`requests`, pointed at the gateway: the usual one loads litellm, 684 MB and eight seconds of CPU per start.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from importlib import resources

from rollcage.agent_events import (
    AgentEvent,
    AgentRaw,
    AgentReasoning,
    AgentReportedError,
    AgentSession,
    AgentText,
    AgentUsage,
)
from rollcage.agents.base import ToolWords
from rollcage.agents.cli_agent import AgentRun, Command, Reader
from rollcage.agents.fields import count, is_number, table, tables, text
from rollcage.agents.python_agent import PythonAgent
from rollcage.agents.tool_calls import RunningCalls
from rollcage.types import HOME, JsonObject, ScriptedCall

_STATE = ".mini-swe-agent"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command that ends its work."""


class MiniSweAgent(PythonAgent):
    """The agent `mini-swe-agent`. Exit code 0: it submitted; 1: its model failed, or it reached a limit of its own."""

    name = "mini-swe-agent"
    version = "2.4.6"
    wire = "chat"
    own_paths = (f"{HOME}/{_STATE}",)
    accepts = frozenset(("system_prompt", "config"))
    tool_words = ToolWords(
        run=lambda command: ScriptedCall(name="bash", arguments={"command": command}),
        submit=SUBMIT,
    )
    driver = resources.files(__package__).joinpath("inside.py").read_text(encoding="utf-8")

    def command(self, run: AgentRun) -> Command:
        """`config` is merged into its `mini.yaml`: `agent`, `environment`, `model`."""
        orders = {
            "task": run.instruction,
            "base_url": run.model.base_url,
            "key": run.key,
            "model": run.model.model,
            "session": f"ses_{secrets.token_hex(8)}",
            "system_prompt": run.spec.system_prompt,
            "config": run.spec.config,
        }
        env = {
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{HOME}/{_STATE}",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
        }
        return Command([], env, json.dumps(orders))

    def reader(self) -> Reader:
        """Its messages, one by one as they join its history."""
        return _Messages()


class _Messages:
    """What joined its history. The result of a call is a message of its own."""

    def __init__(self) -> None:
        self._calls = RunningCalls({"bash": "execute"})

    def __call__(self, data: JsonObject) -> Iterable[AgentEvent]:
        message, extra = table(data.get("message")), table(table(data.get("message")).get("extra"))
        match text(message.get("role")) or text(data.get("type")):
            case "session":
                yield AgentSession(session=text(data.get("session")))
            case "assistant":
                yield from self._said(message, table(table(extra.get("response")).get("usage")))
            case "tool":
                said, code = text(message.get("content")), extra.get("returncode")
                exit_code = int(code) if is_number(code) else None
                yield from self._calls.ended(text(message.get("tool_call_id")), said, exit_code=exit_code)
            case "exit" if extra.get("exit_status") != "Submitted":
                words = text(message.get("content")) or text(extra.get("exit_status"))
                yield AgentReportedError(name=text(extra.get("exit_status")), text=words)
            case "exit":
                # The command that submits has no result of its own.
                yield from self._calls.rest()
                if words := text(message.get("content")):
                    yield AgentText(text=words)
            case other:
                yield AgentRaw(name=other)

    def _said(self, message: JsonObject, usage: JsonObject) -> Iterable[AgentEvent]:
        if thought := text(message.get("reasoning_content") or message.get("reasoning")):
            yield AgentReasoning(text=thought)
        if words := text(message.get("content")):
            yield AgentText(text=words)
        for asked in tables(message.get("tool_calls")):
            function = table(asked.get("function"))
            arguments = _arguments(function.get("arguments"))
            yield self._calls.begun(text(asked.get("id")), text(function.get("name")), arguments)
        yield AgentUsage(
            input_tokens=count(usage.get("prompt_tokens")), output_tokens=count(usage.get("completion_tokens"))
        )


def _arguments(value: object) -> JsonObject:
    try:
        return table(json.loads(value)) if isinstance(value, str) else table(value)
    except ValueError:
        return {}
