"""Claude Code, Anthropic's coding agent: one binary, driven by `claude -p`, on the messages wire."""

from __future__ import annotations

import json

from rollcage.agents import purposes
from rollcage.agents.base import ToolWords
from rollcage.agents.cli_agent import AgentRun, Command, Reader
from rollcage.agents.npm_agent import NpmAgent
from rollcage.agents.packages import Package
from rollcage.agents.stream_json import StreamJson
from rollcage.agents.tool_calls import ToolKind
from rollcage.types import HOME, JsonObject, ScriptedCall

_STATE = ".claude"
_KINDS: dict[str, ToolKind] = {
    "Bash": "execute",
    "Read": "read",
    "Edit": "edit",
    "Write": "edit",
    "NotebookEdit": "edit",
    "Glob": "search",
    "Grep": "search",
    "WebFetch": "fetch",
    "WebSearch": "fetch",
}


class ClaudeCode(NpmAgent):
    """The agent `claude-code`. Exit code 0: it ended by itself; 1: its model failed, or an option is wrong."""

    name = "claude-code"
    version = "2.1.326"
    wire = "messages"
    node = False
    script = "claude"
    packages = {
        "x86_64": Package(
            "@anthropic-ai/claude-code-linux-x64",
            "{version}",
            "RvNuaeMGfPGUyUGttVvhHgVUZ3B2L+Pgf336ImZLsPP2UQHYblewi47CPFLObqz+K6D++PLP1eAsDBLYko3w+g==",
        ),
        "aarch64": Package(
            "@anthropic-ai/claude-code-linux-arm64",
            "{version}",
            "lZCCWXarB/1IeHkotI937eEdN4BCbVdWDdmejtlkbUO9M29rHjITtXW9BWCDFlxvo0GXsFogN0SFIJWgMelKLw==",
        ),
    }
    own_paths = (f"{HOME}/{_STATE}", f"{HOME}/.claude.json")
    accepts = frozenset(("system_prompt", "enabled_tools", "disabled_tools", "config"))
    tools = frozenset(
        (*_KINDS, "Agent", "ListAgents", "ReportFindings", "ScheduleWakeup", "Skill", "ToolSearch", "Workflow")
    )
    takes_mcp = True
    tool_words = ToolWords(
        run=lambda command: ScriptedCall(name="Bash", arguments={"command": command, "description": "do it"}),
        edit=lambda path, text: ScriptedCall(name="Write", arguments={"file_path": path, "content": text}),
        delegate=lambda prompt: ScriptedCall(
            name="Agent",
            arguments={"description": "look", "prompt": prompt, "subagent_type": "general-purpose"},
        ),
    )
    origin = staticmethod(purposes.claude_code)

    def command(self, run: AgentRun) -> Command:
        """No settings of the project, no permission is asked, nothing is fetched, updated or reported."""
        spec, argv = run.spec, ["-p", "--verbose", "--dangerously-skip-permissions"]
        argv += ["--input-format", "stream-json", "--output-format", "stream-json"]
        argv += ["--setting-sources", "", "--strict-mcp-config", "--no-session-persistence"]
        files = {}
        if spec.system_prompt:
            files[f"{_STATE}/rollcage-prompt.md"] = spec.system_prompt
            argv += ["--system-prompt-file", f"{HOME}/{_STATE}/rollcage-prompt.md"]
        if spec.enabled_tools is not None:
            argv += ["--tools", ",".join(spec.enabled_tools)]
        if spec.disabled_tools:
            argv += ["--disallowedTools", ",".join(spec.disabled_tools)]
        if spec.config:
            argv += ["--settings", json.dumps(spec.config)]
        if run.tools_url:
            servers: JsonObject = {"mcpServers": {"env": {"type": "http", "url": run.tools_url, "alwaysLoad": True}}}
            argv += ["--mcp-config", json.dumps(servers)]
        env = {
            "IS_SANDBOX": "1",
            "ANTHROPIC_BASE_URL": run.model.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": run.key,
            "ANTHROPIC_MODEL": run.model.model,
            "ANTHROPIC_SMALL_FAST_MODEL": run.model.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": run.model.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": run.model.model,
            "CLAUDE_CONFIG_DIR": f"{HOME}/{_STATE}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTO_COMPACT": "1",
            "API_TIMEOUT_MS": "3600000",
            "CLAUDE_CODE_MAX_RETRIES": "2",
            "MCP_TOOL_TIMEOUT": "900000",
        }
        # What was typed may be a command of its own, or have files put into it: nothing of this was.
        said = {"type": "user", "text_not_typed": True, "message": {"role": "user", "content": run.instruction}}
        return Command(argv, env, json.dumps(said) + "\n", files)

    def reader(self) -> Reader:
        """Its events: `system`, `assistant`, `user`, `result`."""
        return StreamJson(_KINDS)
