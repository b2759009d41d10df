"""Codex, OpenAI's coding agent: one binary, driven by `codex exec --json`, on the responses wire."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable

from rollcage.agent_events import (
    AgentEvent,
    AgentFileEdit,
    AgentOutput,
    AgentRaw,
    AgentReasoning,
    AgentReportedError,
    AgentSession,
    AgentText,
    AgentToolCall,
    AgentUsage,
)
from rollcage.agents import purposes
from rollcage.agents.base import ToolWords
from rollcage.agents.cli_agent import AgentRun, Command, Reader, kept_mark
from rollcage.agents.fields import count, is_number, table, tables, text
from rollcage.agents.npm_agent import NpmAgent
from rollcage.agents.packages import Package
from rollcage.types import HOME, JsonObject, ScriptedCall

_STATE = ".codex"
_PROMPT = f"{_STATE}/rollcage-prompt.md"


class Codex(NpmAgent):
    """The agent `codex`. Exit code 0: it ended its turn; 1: its model failed, or it was given what it cannot read."""

    name = "codex"
    version = "0.166.0"
    wire = "responses"
    node = False
    script = f"vendor/{platform.machine()}-unknown-linux-musl/bin/codex"
    only = (script, script.replace("bin/codex", "codex-path/"))
    packages = {
        "x86_64": Package(
            "@openai/codex",
            "{version}-linux-x64",
            "CxDm3+D1cpbGJeHrdzINoG+3wn9BVncP4qpZaaNYkxe8iPtRJOYyCJnnPoVjWRIBvI9vPKbRoifsMSA5xDaUpw==",
        ),
        "aarch64": Package(
            "@openai/codex",
            "{version}-linux-arm64",
            "w0ScAsBr9aZKtIFrh6HN6KU2yjKKeSCzYfbb7DB0Ccj4BYPzeZtUeQprbycLCwuX3AFQdbdjapmLho2iot74jQ==",
        ),
    }
    own_paths = (f"{HOME}/{_STATE}",)
    accepts = frozenset(("system_prompt", "config"))
    takes_mcp = True
    tool_words = ToolWords(
        run=lambda command: ScriptedCall(name="exec_command", arguments={"cmd": command}),
        delegate=lambda prompt: ScriptedCall(name="spawn_agent", arguments={"message": prompt}),
    )
    origin = staticmethod(purposes.codex)

    def command(self, run: AgentRun) -> Command:
        """Its own sandbox is off, since it is in a box; nothing is asked, fetched or reported."""
        settings: JsonObject = {
            "model": run.model.model,
            "model_provider": "rollcage",
            "model_providers.rollcage": {
                "name": "rollcage",
                "base_url": run.model.base_url,
                "wire_api": "responses",
                "env_key": "ROLLCAGE_MODEL_KEY",
                "request_max_retries": 2,
                "stream_max_retries": 2,
                "stream_idle_timeout_ms": 3_600_000,
            },
            "model_context_window": 1_000_000,
            "model_auto_compact_token_limit": 900_000,
            "web_search": "disabled",
            "check_for_update_on_startup": False,
            "analytics.enabled": False,
            "feedback.enabled": False,
            "history.persistence": "none",
            # These look for news in the network at every start.
            **{f"features.{name}": False for name in ("plugins", "remote_plugin", "plugin_sharing", "apps")},
        }
        files = {f"{_STATE}/.keep": ""}
        if run.spec.system_prompt:
            files[_PROMPT] = run.spec.system_prompt
            settings["model_instructions_file"] = f"{HOME}/{_PROMPT}"
        if run.tools_url:
            settings["mcp_servers.env"] = {"url": run.tools_url, "tool_timeout_sec": 900}
        settings |= _flat(run.spec.config)
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={_toml(value)}")]
        how = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--ephemeral"]
        env = {"ROLLCAGE_MODEL_KEY": run.key, "CODEX_HOME": f"{HOME}/{_STATE}", "RUST_LOG": "error"}
        return Command(["exec", *how, *options, "-"], env, kept_mark(run.instruction), files)

    def reader(self) -> Reader:
        """Its events: `thread.*`, `turn.*`, `item.*`."""
        return _events


def _flat(config: JsonObject, before: str = "") -> JsonObject:
    """A configuration as dotted keys: one that is set here replaces no more than itself."""
    flat: JsonObject = {}
    for key, value in config.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) and value else {f"{before}{key}": value}
    return flat


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}={_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def _events(data: JsonObject) -> Iterable[AgentEvent]:
    match kind := text(data.get("type")):
        case "thread.started":
            yield AgentSession(session=text(data.get("thread_id")))
        case "item.started" | "item.updated" | "item.completed":
            yield _item(table(data.get("item")), ended=kind == "item.completed")
        case "turn.completed":
            usage = table(data.get("usage"))
            yield AgentUsage(
                input_tokens=count(usage.get("input_tokens")),
                output_tokens=count(usage.get("output_tokens")),
                reasoning_tokens=count(usage.get("reasoning_output_tokens")),
                cached_tokens=count(usage.get("cached_input_tokens")),
            )
        case "turn.failed":
            yield AgentReportedError(name=kind, text=text(table(data.get("error")).get("message")))
        case "error":
            yield AgentReportedError(name=kind, text=text(data.get("message")))
        case _:
            yield AgentRaw(name=kind)


def _item(item: JsonObject, *, ended: bool) -> AgentEvent:
    place = {"id": text(item.get("id"))}
    match kind := text(item.get("type")):
        case "agent_message":
            return AgentText(**place, text=text(item.get("text")), final=ended)
        case "reasoning":
            return AgentReasoning(**place, text=text(item.get("text")), final=ended)
        case "command_execution":
            code = item.get("exit_code")
            return AgentToolCall(
                **place,
                name="exec_command",
                kind="execute",
                title=text(item.get("command")),
                arguments={"command": item.get("command")},
                status=_status(item, ended=ended),
                result=text(item.get("aggregated_output")),
                exit_code=int(code) if is_number(code) else None,
            )
        case "file_change":
            changes = tables(item.get("changes"))
            return AgentToolCall(
                **place,
                name="apply_patch",
                kind="edit",
                title=", ".join(text(change.get("path")) for change in changes),
                status=_status(item, ended=ended),
                edits=tuple(_edit(change) for change in changes),
            )
        case "mcp_tool_call":
            return AgentToolCall(
                **place,
                name=text(item.get("tool")),
                title=text(item.get("tool")),
                arguments=table(item.get("arguments")),
                status=_status(item, ended=ended),
                result=text(item.get("result")),
                error=text(table(item.get("error")).get("message")),
            )
        case "error":
            return AgentOutput(**place, text=text(item.get("message")))
        case _:
            return AgentRaw(**place, name=kind)


def _status(item: JsonObject, *, ended: bool) -> str:
    if item.get("status") in ("failed", "declined"):
        return "error"
    return "completed" if ended else "running"


def _edit(change: JsonObject) -> AgentFileEdit:
    words = {"add": "write", "delete": "delete"}
    return AgentFileEdit(path=text(change.get("path")), change=words.get(text(change.get("kind")), "edit"))
