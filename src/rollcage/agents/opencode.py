"""OpenCode: how it is installed, configured, started and read. No egress but to its model.

Two drivers: `run` is one process for one prompt that prints its events; `serve` is OpenCode's own server, driven over
HTTP, with a live transcript and an abort that stops generation at once (docs/agents.md).
"""

from __future__ import annotations

import json
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import anyio
from anyio.abc import ByteReceiveStream, TaskStatus

from rollcage.agents.base import AgentExit, Offer, Say
from rollcage.agents.opencode_listener import error_line
from rollcage.agents.opencode_package import cpu_flags, layer_of, package_for
from rollcage.agents.opencode_server import Drive, Printed, Server
from rollcage.errors import UsageError
from rollcage.events import AgentSaid, AgentStarted
from rollcage.layers import Layer
from rollcage.sandboxes.base import Process, Sandbox
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

DRIVERS = ("run", "serve")
DRIVER = "run"
"""The one that is used where nobody says (bench/drivers.py has the numbers)."""

MAX_LINE = 4 << 20
MAX_SAID = 64 << 20
"""How much of its own stream an agent may put into the log; a runaway cannot fill the disk."""

_SWITCHES = (
    "DISABLE_MODELS_FETCH DISABLE_AUTOUPDATE DISABLE_LSP_DOWNLOAD DISABLE_DEFAULT_PLUGINS PURE DISABLE_PROJECT_CONFIG "
    "DISABLE_EXTERNAL_SKILLS DISABLE_CLAUDE_CODE DISABLE_SHARE DISABLE_AUTOCOMPACT DISABLE_PRUNE DISABLE_FFF "
    "EXPERIMENTAL_DISABLE_FILEWATCHER DISABLE_TERMINAL_TITLE DISABLE_EMBEDDED_WEB_UI"
).split()


class OpenCode:
    """The agent `opencode`."""

    name = "opencode"
    own_paths: Sequence[str] = tuple(
        f"{HOME}/{path}"
        for path in (
            ".rollcage/bin",
            ".rollcage/opencode.json",
            ".config/opencode",
            ".cache/opencode",
            ".local/share/opencode",
            ".local/state/opencode",
        )
    )

    def __init__(self, downloads: Path) -> None:
        """`downloads`: where the fetched package is kept."""
        self._downloads = downloads
        self._warm: dict[str, Server] = {}
        self._printed: WeakKeyDictionary[Sandbox, Printed] = WeakKeyDictionary()
        self._package = package_for(platform.machine(), cpu_flags())

    @property
    def version(self) -> str:
        """The exact version that is run."""
        return self._package.version

    def check(self, spec: AgentSpec) -> None:
        """Drivers and tools it does not have, or tools it cannot offer one without the other."""
        if spec.driver not in ("", *DRIVERS):
            raise UsageError(f"agent driver {spec.driver!r}: OpenCode has {' and '.join(DRIVERS)}")
        permissions_of(spec)

    def layers(self) -> Sequence[Layer]:
        """One layer: the binary, ripgrep (its search tools need it), and a seeded configuration."""
        return [layer_of(self._package, self._downloads)]

    async def solve(
        self, box: Sandbox, instruction: str, offer: Offer, spec: AgentSpec, *, workdir: str, say: Say
    ) -> AgentExit:
        """Work on the instruction with the driver that was asked for; a warm server is used where there is one."""
        await say(AgentStarted(agent=self.name, version=self.version))
        config = config_of(spec, offer.model, offer.tools_url)
        async with self._warmth(box, spec) as warm:
            if warm is None and (spec.driver or DRIVER) == "run":
                self._printed[box] = printed = Printed()
                heard = _Heard(say, printed)
                return await _run(box, instruction, environment_of(config) | spec.env, workdir=workdir, heard=heard)
            prompt = {
                "model": {"providerID": PROVIDER, "modelID": offer.model.model},
                "agent": "build",
                "parts": [{"type": "text", "text": instruction}],
            }
            async with AsyncExitStack() as stack:
                server = warm
                if server is None:
                    cold = Server.start(box, BINARY, environment_of() | spec.env)
                    server = await stack.enter_async_context(cold)
                self._printed[box] = server.printed
                if server.code is not None:
                    error = server.printed.complaint or "its server did not start"
                    return AgentExit(code=server.code or 1, error=error)
                return await Drive(server, workdir, say, limit=MAX_SAID).solve(config, prompt)

    async def warm(self, box: Sandbox, *, task_status: TaskStatus[Server]) -> None:
        """Start a server in a box for whatever `solve` comes next there; returns when it is used up, or dead.

        It knows neither the task nor the model nor the configuration yet.
        """
        async with Server.start(box, BINARY, environment_of()) as server:
            self._warm[box.id] = server
            try:
                task_status.started(server)
                await server.kept()
            finally:
                self._warm.pop(box.id, None)

    @asynccontextmanager
    async def _warmth(self, box: Sandbox, spec: AgentSpec) -> AsyncIterator[Server | None]:
        """The warm server of a box, where there is one that fits; it is dead at the end of the block at the latest."""
        server = self._warm.pop(box.id, None)
        if server is None:
            yield None
            return
        try:
            fits = server.alive and not spec.env and spec.driver != "run"
            if not fits:
                await server.cool()
            yield server if fits else None
        finally:
            with anyio.CancelScope(shield=True):
                await server.cool()

    async def log_tail(self, box: Sandbox) -> str:
        """The end of its log, as it was printed: the file it keeps lacks its last lines when it ends quickly."""
        printed = self._printed.pop(box, None)
        return "" if printed is None else printed.text


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
    return _merged(config, spec.config)


def permissions_of(spec: AgentSpec) -> dict[str, str]:
    """Which tools the model is offered. The last rule that fits decides, so the order matters."""
    named = set(spec.enabled_tools or ()) | set(spec.disabled_tools)
    if unknown := named - TOOLS:
        raise UsageError(
            f"agent tools: OpenCode has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(TOOLS))}"
        )
    offered = set(TOOLS if spec.enabled_tools is None else spec.enabled_tools) - set(spec.disabled_tools)
    edits = offered & EDIT_TOOLS
    if edits and spec.enabled_tools is None and edits != EDIT_TOOLS:
        raise UsageError("agent tools: OpenCode offers edit, write and apply_patch together; disable all three or none")
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


async def _run(
    box: Sandbox, instruction: str, environment: dict[str, str], *, workdir: str, heard: _Heard
) -> AgentExit:
    """`opencode run` with the prompt on stdin, its JSON events into the log as they come."""
    argv = [BINARY, "run", "--format", "json", "--thinking"]
    async with box.spawn(argv, env=environment, cwd=workdir) as process:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_prompt, process, instruction)
            tasks.start_soon(heard.printed.drain, process.stderr)
            await heard.events(process.stdout)
        code = await process.wait()
    return AgentExit(code=code, error=heard.error or (heard.printed.complaint if code else None))


class _Heard:
    """Reads what OpenCode prints."""

    def __init__(self, say: Say, printed: Printed) -> None:
        self._say, self._said = say, 0
        self.error: str | None = None
        self.printed = printed

    async def events(self, stream: ByteReceiveStream) -> None:
        async for line in _lines(stream):
            self._said += len(line)
            if self._said > MAX_SAID:
                continue
            try:
                data = json.loads(line)
            except (ValueError, RecursionError):
                data = None
            if not isinstance(data, dict):
                data = {"type": "stdout", "text": line.decode("utf-8", "replace")}
            if data.get("type") == "error":
                self.error = error_line(data.get("error"))
            await self._say(AgentSaid(data=data))


async def _prompt(process: Process, instruction: str) -> None:
    # OpenCode waits for the end of its input; an agent that died already shows in its exit code.
    try:
        await process.stdin.send(instruction.encode())
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return
    finally:
        await process.stdin.aclose()


async def _lines(stream: ByteReceiveStream) -> AsyncIterator[bytes]:
    buffer = bytearray()
    async for chunk in stream:
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0 or len(buffer) > MAX_LINE:
            end = end if end >= 0 else len(buffer)
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.strip():
                yield line
    if buffer.strip():
        yield bytes(buffer)


def _merged(base: JsonObject, over: JsonObject) -> JsonObject:
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
