"""Pi, a small coding agent with a short prompt and four tools: Node runs it, on the chat wire."""

from __future__ import annotations

import json
from collections.abc import Iterable

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
from rollcage.agents.fields import count, merged, table, tables, text
from rollcage.agents.npm_agent import ANY, NpmAgent, locked
from rollcage.agents.packages import Package
from rollcage.agents.purposes import by_prompt
from rollcage.agents.tool_calls import RunningCalls, ToolKind
from rollcage.types import HOME, CallOrigin, JsonObject, Purpose, ScriptedCall

_STATE = ".pi/agent"
_PROMPT = f"{_STATE}/rollcage-prompt.md"
_BLANKS = "\t\n\v\f\r \xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_BLANKS += "\u2028\u2029\u202f\u205f\u3000\ufeff"
"""What a program in JavaScript takes for blank."""
_KINDS: dict[str, ToolKind] = {
    "bash": "execute",
    "read": "read",
    "edit": "edit",
    "write": "edit",
    "grep": "search",
    "find": "search",
    "ls": "search",
}
_SUMMARIES = ("You are a context summarization assistant",)


class Pi(NpmAgent):
    """The agent `pi`. Exit code 0: it ended by itself; 1: its model failed.

    Its own exit code is 0 as well where it never called its model; then the rollout has failed.
    """

    name = "pi"
    version = "0.87.1"
    wire = "chat"
    script = "dist/cli.js"
    packages = {
        ANY: Package(
            "@earendil-works/pi-coding-agent",
            "{version}",
            "m8ArJUtVcQMSe1lLE/Ei7vX/JV7O39sWmWBsXV2NOU70F0qCp8GubA24pT3LnwTmM6LL2xV80/h6sQg85n69ew==",
        )
    }
    lock = locked("pi")
    own_paths = (f"{HOME}/.pi",)
    accepts = frozenset(("system_prompt", "enabled_tools", "disabled_tools", "config"))
    tools = frozenset(_KINDS)
    tool_words = ToolWords(
        run=lambda command: ScriptedCall(name="bash", arguments={"command": command}),
        edit=lambda path, text: ScriptedCall(name="write", arguments={"path": path, "content": text}),
    )

    def command(self, run: AgentRun) -> Command:
        """No extensions, skills or context files of the project; `config` is merged into its settings.json."""
        argv = ["-p", "--mode", "json", "--no-session", "--offline", "-ne", "-ns", "-np", "-nc", "-na"]
        argv += ["--provider", "rollcage", "--model", run.model.model]
        if run.spec.system_prompt:
            argv += ["--system-prompt", f"{HOME}/{_PROMPT}"]
        if run.spec.enabled_tools is not None:
            argv += ["--tools", ",".join(run.spec.enabled_tools)] if run.spec.enabled_tools else ["--no-tools"]
        if run.spec.disabled_tools:
            argv += ["--exclude-tools", ",".join(run.spec.disabled_tools)]
        models: JsonObject = {
            "baseUrl": run.model.base_url,
            "api": "openai-completions",
            "apiKey": "$ROLLCAGE_MODEL_KEY",
            "models": [{"id": run.model.model, "contextWindow": 1_000_000, "maxTokens": 32_000}],
        }
        settings = {"compaction": {"enabled": False}, "retry": {"enabled": True, "maxRetries": 2}}
        files = {
            f"{_STATE}/models.json": json.dumps({"providers": {"rollcage": models}}),
            f"{_STATE}/settings.json": json.dumps(merged(settings, run.spec.config)),
        }
        if run.spec.system_prompt:
            files[_PROMPT] = run.spec.system_prompt
        env = {
            "ROLLCAGE_MODEL_KEY": run.key,
            "PI_CODING_AGENT_DIR": f"{HOME}/{_STATE}",
            "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_TELEMETRY": "0",
        }
        # It takes blanks off the ends of what it reads; an argument it takes as it is, and puts it behind.
        read = run.instruction.rstrip(_BLANKS)
        read = read if read == read.lstrip(_BLANKS) else ""
        rest = run.instruction[len(read) :]
        return Command([*argv, "--", rest] if rest else argv, env, read, files)

    def origin(self, headers: dict[str, str], body: JsonObject) -> CallOrigin:
        """It names no session; a summary begins with words of its own."""
        return CallOrigin(by_prompt(body, (), _SUMMARIES) or Purpose.AGENT)

    def reader(self) -> Reader:
        """Its events: `session`, `message_*`, `tool_execution_*`, `turn_*`, `agent_*`."""
        return _Events()


class _Events:
    """Results of calls are told in events of their own."""

    def __init__(self) -> None:
        self._calls = RunningCalls(_KINDS)

    def __call__(self, data: JsonObject) -> Iterable[AgentEvent]:
        call_id = text(data.get("toolCallId"))
        match kind := text(data.get("type")):
            case "session":
                yield AgentSession(session=text(data.get("id")))
            case "message_end":
                yield from _message(table(data.get("message")))
            case "tool_execution_start":
                yield self._calls.begun(call_id, text(data.get("toolName")), table(data.get("args")))
            case "tool_execution_end":
                parts = tables(table(data.get("result")).get("content"))
                said = "\n".join(text(part.get("text")) for part in parts)
                yield from self._calls.ended(call_id, said, failed=data.get("isError") is True)
            case "message_start" | "message_update" | "tool_execution_update" | "turn_end" | "agent_end":
                pass  # what they hold comes again whole, or came already
            case _:
                yield AgentRaw(name=kind)


def _message(message: JsonObject) -> Iterable[AgentEvent]:
    if message.get("role") != "assistant":
        return
    for part in tables(message.get("content")):
        match text(part.get("type")):
            case "text":
                yield AgentText(text=text(part.get("text")))
            case "thinking":
                yield AgentReasoning(text=text(part.get("thinking")))
    usage = table(message.get("usage"))
    yield AgentUsage(
        input_tokens=count(usage.get("input")),
        output_tokens=count(usage.get("output")),
        cached_tokens=count(usage.get("cacheRead")),
        finish_reason=text(message.get("stopReason")),
    )
    if message.get("stopReason") in ("error", "aborted"):
        yield AgentReportedError(name=text(message.get("stopReason")), text=text(message.get("errorMessage")))
