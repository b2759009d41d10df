"""Qwen Code, Alibaba's coding agent: Node runs it, on the chat wire."""

from __future__ import annotations

import json

from rollcage.agents.base import ToolWords
from rollcage.agents.cli_agent import AgentRun, Command, Reader
from rollcage.agents.npm_agent import ANY, NpmAgent
from rollcage.agents.packages import Package
from rollcage.agents.stream_json import StreamJson, ToolKind
from rollcage.types import HOME, JsonObject, ScriptedCall

_STATE = ".qwen"
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
    )

    def command(self, run: AgentRun) -> Command:
        """`config` goes into its settings.json."""
        spec, argv = run.spec, ["--yolo", "--output-format", "stream-json", "--auth-type", "openai"]
        argv += ["--model", run.model.model]
        if spec.system_prompt:
            argv += ["--system-prompt", spec.system_prompt]
        if spec.enabled_tools is not None:
            argv += ["--core-tools", ",".join(spec.enabled_tools) or "none"]
        if spec.disabled_tools:
            argv += ["--exclude-tools", ",".join(spec.disabled_tools)]
        settings: JsonObject = {
            "general": {"enableAutoUpdate": False, "checkpointing": {"enabled": False}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": {"skipStartupContext": False},
            **spec.config,
        }
        if run.tools_url:
            settings["mcpServers"] = {"env": {"httpUrl": run.tools_url, "trust": True, "timeout": 900_000}}
        env = {
            "OPENAI_API_KEY": run.key,
            "OPENAI_BASE_URL": run.model.base_url,
            "OPENAI_MODEL": run.model.model,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_HOME": f"{HOME}/{_STATE}",
        }
        return Command(argv, env, run.instruction, {f"{_STATE}/settings.json": json.dumps(settings)})

    def reader(self) -> Reader:
        """Its events: those of Claude Code."""
        return StreamJson(_KINDS)
