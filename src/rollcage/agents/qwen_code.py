"""Qwen Code, Alibaba's coding agent: Node runs it, on the chat wire."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping

from rollcage.agents.base import ToolWords
from rollcage.agents.cli_agent import AgentRun, Command, Reader
from rollcage.agents.fields import merged, tables, text
from rollcage.agents.npm_agent import ANY, NpmAgent
from rollcage.agents.packages import Package
from rollcage.agents.purposes import by_prompt
from rollcage.agents.stream_json import StreamJson
from rollcage.agents.tool_calls import ToolKind
from rollcage.errors import AgentError
from rollcage.types import HOME, CallOrigin, JsonObject, Purpose, ScriptedCall

_STATE = ".qwen"
_PROMPT = f"{_STATE}/rollcage-prompt.md"
_COMMAND = f"{_STATE}/commands/rollcage-prompt.toml"
_KINDS: dict[str, ToolKind] = {
    "run_shell_command": "execute",
    "read_file": "read",
    "edit": "edit",
    "write_file": "edit",
    "glob": "search",
    "grep_search": "search",
    "list_directory": "search",
    "web_fetch": "fetch",
}
_SESSION = "x-session-id"
"""A header that all calls of one run get; by itself it names no session."""
_SUBAGENT = "return the final result as a normal model response (not a tool call) and stop."
"""Stands in the system prompt of every subagent, and in no other."""
_SUMMARIES = ("You are the component that summarizes",)


class QwenCode(NpmAgent):
    """The agent `qwen-code`. Exit code 0: it ended by itself; 1: its model failed, or an option is wrong."""

    name = "qwen-code"
    version = "0.24.4"
    wire = "chat"
    script = "cli.js"
    packages = {
        ANY: Package(
            "@qwen-code/qwen-code",
            "{version}",
            "pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg==",
        )
    }
    own_paths = (f"{HOME}/{_STATE}",)
    accepts = frozenset(("system_prompt", "enabled_tools", "disabled_tools", "config"))
    tools = frozenset(
        (*_KINDS, "agent", "get_goal", "list_agents", "notebook_edit", "skill", "tool_search", "update_goal")
    )
    takes_mcp = True
    tool_words = ToolWords(
        run=lambda command: ScriptedCall(
            name="run_shell_command", arguments={"command": command, "description": "do it", "is_background": False}
        ),
        edit=lambda path, text: ScriptedCall(name="write_file", arguments={"file_path": path, "content": text}),
        delegate=lambda prompt: ScriptedCall(
            name="agent",
            arguments={"description": "look", "prompt": prompt, "subagent_type": "general-purpose"},
        ),
    )

    def command(self, run: AgentRun) -> Command:
        """`config` is merged into its settings.json. Its window is named so large that it sums nothing up."""
        spec, argv = run.spec, ["--yolo", "--output-format", "stream-json", "--auth-type", "openai"]
        argv += ["--model", run.model.model]
        files, prompt = {}, run.instruction
        if spec.system_prompt:
            files[_PROMPT] = spec.system_prompt
        if _altered(prompt):
            files[_COMMAND], prompt = f"prompt = {_toml(prompt)}", "/rollcage-prompt"
        if spec.enabled_tools is not None:
            argv += ["--core-tools", ",".join(spec.enabled_tools) or "none"]
        if spec.disabled_tools:
            argv += ["--exclude-tools", ",".join(spec.disabled_tools)]
        settings: JsonObject = {
            "general": {"enableAutoUpdate": False, "checkpointing": {"enabled": False}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            # Else another agent goes through each conversation when it has ended, for what may be worth keeping.
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "model": {
                "skipStartupContext": False,
                "generationConfig": {
                    "contextWindowSize": 1_000_000,
                    "customHeaders": {_SESSION: f"ses_{secrets.token_hex(8)}"},
                },
            },
        }
        settings = merged(settings, spec.config)
        if run.tools_url:
            # Offered from the start: a model need not search for them.
            offered = {"httpUrl": run.tools_url, "trust": True, "timeout": 900_000, "alwaysLoadTools": True}
            settings["mcpServers"] = {"env": offered}
        env = {
            "OPENAI_API_KEY": run.key,
            "OPENAI_BASE_URL": run.model.base_url,
            "OPENAI_MODEL": run.model.model,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_HOME": f"{HOME}/{_STATE}",
            **({"QWEN_SYSTEM_MD": f"{HOME}/{_PROMPT}"} if spec.system_prompt else {}),
        }
        return Command(argv, env, prompt, {**files, f"{_STATE}/settings.json": json.dumps(settings)})

    def origin(self, headers: Mapping[str, str], body: JsonObject) -> CallOrigin:
        """It names no sessions: a subagent is known by its system prompt, and told from others by how it begins."""
        session, messages = headers.get(_SESSION, ""), tables(body.get("messages"))
        system = text(messages[0].get("content")) if messages else ""
        purpose = by_prompt(body, (), _SUMMARIES)
        if _SUBAGENT not in system:
            return CallOrigin(purpose or Purpose.AGENT, session)
        said = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
        begins = hashlib.sha256(json.dumps(messages[:said], sort_keys=True).encode()).hexdigest()
        return CallOrigin(purpose or Purpose.SUBAGENT, f"{session}-{begins[:12]}", session)

    def reader(self) -> Reader:
        """Its events: those of Claude Code."""
        return StreamJson(_KINDS)


def _altered(prompt: str) -> bool:
    """Whether it would take a prompt for a command, or put files into it; that of a command file it takes as it is."""
    if not prompt.startswith("/") and "@" not in prompt:
        return False
    if found := next((mark for mark in ("{{args}}", "!{") if mark in prompt), ""):
        raise AgentError(f"qwen-code cannot be given a prompt with {found} in it that begins with / or has an @ in it")
    return True


def _toml(words: str) -> str:
    return json.dumps(words, ensure_ascii=False).replace("\x7f", "\\u007f")
