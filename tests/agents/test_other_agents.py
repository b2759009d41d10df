"""The real Claude Code and the real Codex in a real box without network, through the gateway: not one turn is lost.

They come from npm, once, into the cache. Skipped only where Node is too old for them; any other failure is one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from rollcage.agents.purposes import by_headers
from rollcage.runner import Registry
from rollcage.sandboxes.base import Exit, Sandbox, run, sh
from rollcage.sandboxes.layers import Layer
from rollcage.simulators import ScriptedModel
from rollcage.types import HOME, Endpoint, Limits, Purpose, SandboxSpec, ScriptedCall, ScriptedTurn, Turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

INSTALL_S = 300
AGENT_S = 300
WORKDIR = f"{HOME}/workdir"
AGENTS = f"{HOME}/.agents"
WRITES = "printf 'written %s\\n' $((6*7)) > note.txt"
READS = "cat note.txt"
WRITTEN = "written 42"
"""The shell works it out: it is in no command, so whoever says it has seen the file."""


@dataclass(frozen=True)
class Cli:
    """An agent from npm: which one, how it is started, and what its shell tool is called."""

    package: str
    version: str
    script: str
    """What Node runs, within the package."""
    arguments: Callable[[Endpoint], list[str]]
    environment: Callable[[Endpoint], dict[str, str]]
    shell: Callable[[str], ScriptedCall]

    @property
    def name(self) -> str:
        return f"{self.package.rpartition('/')[2]}-{self.version}"


def claude_arguments(_: Endpoint) -> list[str]:
    return ["-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]


def claude_environment(lent: Endpoint) -> dict[str, str]:
    return {
        "IS_SANDBOX": "1",
        "ANTHROPIC_BASE_URL": lent.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": lent.key.get_secret_value(),
        "ANTHROPIC_MODEL": lent.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex_arguments(lent: Endpoint) -> list[str]:
    provider = f'{{name="lent",base_url="{lent.base_url}",wire_api="responses",env_key="LENT_KEY"}}'
    return [
        *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", "model_provider=lent", "-c", f"model_providers.lent={provider}", "-m", lent.model),
    ]


def codex_environment(lent: Endpoint) -> dict[str, str]:
    return {"LENT_KEY": lent.key.get_secret_value()}


CLAUDE_CODE = Cli(
    package="@anthropic-ai/claude-code",
    version="2.1.197",
    script="cli-wrapper.cjs",
    arguments=claude_arguments,
    environment=claude_environment,
    shell=lambda command: ScriptedCall(name="Bash", arguments={"command": command, "description": "do it"}),
)
CODEX = Cli(
    package="@openai/codex",
    version="0.166.0",
    script="bin/codex.js",
    arguments=codex_arguments,
    environment=codex_environment,
    shell=lambda command: ScriptedCall(name="exec_command", arguments={"cmd": command}),
)


async def installed(cli: Cli, cache: Path) -> Path:
    """The folder npm has made; whole or not there at all, so that a broken download is not taken for one."""
    folder = cache / cli.name
    if await anyio.Path(folder).exists():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        pytest.fail("npm is missing, it fetches the agents once; run: apt-get install npm")
    await anyio.Path(cache).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = anyio.Path(scratch) / "made"
        # Without the packages' own scripts: what they would put in place, Node finds by itself.
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--engine-strict", "--cache", f"{scratch}/cache"]
        argv = ["timeout", str(INSTALL_S), npm, "install", "--prefix", str(made), *options]
        done = await anyio.run_process([*argv, f"{cli.package}@{cli.version}"], check=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            # The very last line only tells where npm keeps its log.
            lines = [line for line in said.splitlines() if "complete log" not in line]
            if "EBADENGINE" in said:
                pytest.skip(f"Node is too old for {cli.name}: {lines[-1]}")
            pytest.fail(f"npm could not install {cli.name}: {lines[-1] if lines else f'exit code {done.returncode}'}")
        await made.rename(folder)
    return folder


def layer_of(cli: Cli, source: Path) -> Layer:
    async def build(folder: Path) -> None:
        await anyio.to_thread.run_sync(lambda: shutil.copytree(source, folder / ".agents", symlinks=True))

    return Layer(name=cli.name, key=f"{cli.package}@{cli.version} 1", build=build)


async def work(cli: Cli, box: Sandbox, lent: Endpoint) -> Exit:
    """The agent from its start to its end, in the box."""
    argv = ["node", f"{AGENTS}/node_modules/{cli.package}/{cli.script}", *cli.arguments(lent)]
    environment = cli.environment(lent)
    prompt = b"Write a note and read it."
    return await run(box, argv, stdin=prompt, env=environment, cwd=WORKDIR, timeout_s=AGENT_S, limit=4 << 20)


async def places_of(secret: str, box: Sandbox) -> str:
    """The files in the box that hold a text, the agent's own program aside."""
    found = await sh(box, f"grep -rlF -e '{secret}' --exclude-dir=.agents {HOME} /tmp", timeout_s=60)
    assert found.code in (0, 1), found.stderr.text
    return found.stdout.text


@pytest.mark.parametrize("cli", [CLAUDE_CODE, CODEX], ids=lambda cli: cli.name)
async def test_a_real_agent_works_in_its_box_and_every_turn_is_trainable(
    cli: Cli, backends: Registry, model: ScriptedModel, state_dir: Path
) -> None:
    layer = layer_of(cli, await installed(cli, state_dir / "cache" / "agents"))
    script = [
        ScriptedTurn(reasoning="I write it.", text="Writing.", tool_calls=(cli.shell(WRITES),)),
        ScriptedTurn(reasoning="I look at it.", text="Reading.", tool_calls=(cli.shell(READS),)),
        ScriptedTurn(text="All is done."),
    ]
    endpoint = model.endpoint(script)
    await backends.gateway.check(endpoint)
    recorded: list[Turn] = []

    async def record(turn: Turn) -> None:
        recorded.append(turn)

    async with backends.providers["local"].open(SandboxSpec(), [layer]) as box, box.listen(7000) as sock:
        await box.write(f"{WORKDIR}/task.txt", b"Write a note, read it.\n")
        async with backends.gateway.lend(
            endpoint, sock, limits=Limits(), mode="transparent_proxy", record=record, classify=by_headers
        ) as lease:
            ended = await work(cli, box, lease.endpoint)
        said = ended.stdout.text + ended.stderr.text
        assert (ended.code, ended.timed_out) == (0, False), said[-4000:]
        assert await box.read(f"{WORKDIR}/note.txt") == f"{WRITTEN}\n".encode()
        real_key = endpoint.key.get_secret_value()
        assert not (ended.stdout.truncated or ended.stderr.truncated)
        assert "All is done." in said, "it is the agent's output that is searched"
        assert real_key not in said
        assert f"{WORKDIR}/note.txt" in await places_of(WRITTEN, box), "the search does find what is there"
        assert await places_of(real_key, box) == ""

    assert [turn.purpose for turn in recorded] == [Purpose.AGENT] * 3
    assert [(turn.error, turn.untrainable_reason, turn.trainable) for turn in recorded] == [(None, "", True)] * 3
    assert all(turn.prompt_ids and len(turn.tokens) == turn.usage["completion_tokens"] for turn in recorded)
    assert [turn.finish_reason for turn in recorded] == ["tool_calls", "tool_calls", "stop"]
    (session,) = {turn.session for turn in recorded}
    assert session, "the agent's own id for it"
    assert real_key not in json.dumps([turn.request for turn in recorded])
    results = [message for message in recorded[2].request["messages"] if message["role"] == "tool"]
    assert WRITTEN not in results[0]["content"]
    assert WRITTEN in results[1]["content"], "the command was run in the box, and the model was told"
