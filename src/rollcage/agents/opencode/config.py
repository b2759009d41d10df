"""OpenCode's configuration and environment: one provider, no calls of its own accord, no egress but to its model."""

from __future__ import annotations

import json

from rollcage.agents.fields import merged
from rollcage.errors import UsageError
from rollcage.types import HOME, AgentSpec, Endpoint, JsonObject

BINARY = f"{HOME}/.rollcage/bin/opencode"
"""Not in `~/.opencode`: OpenCode takes that for a folder of its configuration, and loses time making it up."""
MODELS = f"{HOME}/.config/opencode/models.json"
PROVIDER = "rollcage"
MCP = "env"
"""What OpenCode calls the remote environment: the model sees its tools as `env_<name>`."""

TOOLS = frozenset("apply_patch bash edit glob grep read skill task todowrite webfetch write".split())
"""The tools OpenCode can offer to a model."""
EDIT_TOOLS = frozenset(("apply_patch", "edit", "write"))
"""OpenCode knows these as one permission, `edit`: they come and go together."""

_SWITCHES = (
    "DISABLE_MODELS_FETCH DISABLE_AUTOUPDATE DISABLE_LSP_DOWNLOAD DISABLE_DEFAULT_PLUGINS PURE DISABLE_PROJECT_CONFIG "
    "DISABLE_EXTERNAL_SKILLS DISABLE_CLAUDE_CODE DISABLE_SHARE DISABLE_FFF "
    "EXPERIMENTAL_DISABLE_FILEWATCHER DISABLE_TERMINAL_TITLE DISABLE_EMBEDDED_WEB_UI"
).split()


def config_of(spec: AgentSpec, model: Endpoint, tools_url: str = "") -> JsonObject:
    """OpenCode's configuration: one provider, no title and compaction calls, permissions that never ask.

    `tools_url`: an MCP endpoint in the box; its tools are offered beside OpenCode's own, whatever else is enabled.
    """
    name = f"{PROVIDER}/{model.model}"
    build: JsonObject = {"prompt": spec.system_prompt} if spec.system_prompt else {}
    config: JsonObject = {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "lsp": False,
        "formatter": False,
        "plugin": [],
        "enabled_providers": [PROVIDER],
        "permission": permissions_of(spec),
        "agent": {"title": {"disable": True}, "build": build},
        "compaction": {"auto": False, "prune": False},
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {
                    "baseURL": model.base_url,
                    "apiKey": model.key.get_secret_value(),
                    "headerTimeout": False,
                    "chunkTimeout": False,
                },
                "models": {
                    model.model: {
                        "name": model.model,
                        "tool_call": True,
                        "limit": {"context": 1_000_000, "output": 32_000},
                    }
                },
            }
        },
    }
    if tools_url:
        # Its time limit is for connecting and for calls; the environment has limits of its own, and the agent too.
        config["mcp"] = {MCP: {"type": "remote", "url": tools_url, "enabled": True, "oauth": False, "timeout": 900_000}}
        config["permission"] = {**config["permission"], f"{MCP}_*": "allow"}
    return merged(config, spec.config)


def permissions_of(spec: AgentSpec) -> dict[str, str]:
    """Which tools the model is offered. The last rule that fits decides, so the order matters."""
    named = set(spec.enabled_tools or ()) | set(spec.disabled_tools)
    if unknown := named - TOOLS:
        wrong = "enabled_tools" if unknown & set(spec.enabled_tools or ()) else "disabled_tools"
        raise UsageError(
            f"OpenCode has no {', '.join(sorted(unknown))}",
            argument=wrong,
            remedy=f"it has {', '.join(sorted(TOOLS))}",
        )
    offered = set(TOOLS if spec.enabled_tools is None else spec.enabled_tools) - set(spec.disabled_tools)
    edits = offered & EDIT_TOOLS
    if edits and spec.enabled_tools is None and edits != EDIT_TOOLS:
        raise UsageError(
            "OpenCode offers edit, write and apply_patch together",
            argument="disabled_tools" if spec.enabled_tools is None else "enabled_tools",
            remedy="disable all three or none",
        )
    rules = {} if spec.enabled_tools is None else {"*": "deny"}
    rules |= dict.fromkeys(sorted(offered - EDIT_TOOLS), "allow") if spec.enabled_tools is not None else {}
    rules |= dict.fromkeys(sorted(TOOLS - EDIT_TOOLS - offered), "deny")
    rules["edit"] = "allow" if edits else "deny"
    return (
        rules
        | {"external_directory": "allow", "doom_loop": "allow", "question": "deny"}
        | ({"read": "allow"} if "read" in offered else {})
    )


def environment_of(config: JsonObject | None = None) -> dict[str, str]:
    """The environment of a lean OpenCode that talks to nobody but its model; `config` goes along where it is known."""
    content = {} if config is None else {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    return {
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        "XDG_CONFIG_HOME": f"{HOME}/.config",
        "XDG_DATA_HOME": f"{HOME}/.local/share",
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "XDG_STATE_HOME": f"{HOME}/.local/state",
        "OPENCODE_MODELS_PATH": MODELS,
        "OPENCODE_PRINT_LOGS": "1",
        **content,
        **{f"OPENCODE_{switch}": "1" for switch in _SWITCHES},
    }
