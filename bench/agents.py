"""What each agent costs: a rollout of three model calls (`--turns`) beside the naked CLI, in one run; its prompt, size
and memory.

    python bench/agents.py [NAME ...] [--rounds 3] [--turns 3] [--json]

The naked CLI is the same program with the same arguments and files, started by hand on this machine; a gateway in this
process translates for it, and costs it nothing. Both are answered by the same scripted model in a process of its own.
CPU of the naked CLI is that of its processes; CPU of a rollout is that of its box, of whatever opened it, and of this
process: runner, gateway, log and verifier (counted by cgroup v1's cpuacct; without that, it is the whole machine's).
Rounds are interleaved, medians count. `shell` is a rollout in which no agent works, only the same two commands: box,
log and verifier alone, the same for every agent. `less that` is the ratio of what a rollout costs beside it: the
agent in its box, and the gateway. Wall is of little worth on a busy machine.

Memory is that of the box's processes (PSS) while the model thinks: of one box, and of each further one, which shares
the program with the first. `in 8 GB` is how many such rollouts fit.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import anyio
from pydantic import SecretStr

from rollcage.agents.base import Agent, Scriptable
from rollcage.agents.cli_agent import AgentRun, CliAgent
from rollcage.agents.purposes import by_headers
from rollcage.gateway import Gateway
from rollcage.results.fold import Rollout
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.local.box import LocalBox
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import HOME, AgentSpec, Endpoint, Job, Limits, SandboxSpec, ScriptedTurn, Task
from rollcage.wiring import agents
from rollout import Cost
from rollout import naked as naked_opencode

TASK = Task(instruction="Write hello to hello.txt and read it back.", verify=("grep -qx hello hello.txt",))
AGENTS = ("opencode", "claude-code", "codex", "pi", "qwen-code", "mini-swe-agent")
WAITING = 4
"""Boxes that wait for their model at once."""
GB_8 = 8 << 30
SERVER = """
import json, sys, anyio
from rollcage.simulators import ScriptedModel
from rollcage.types import ScriptedTurn
async def main():
    async with ScriptedModel() as model:
        for turns in json.loads(sys.argv[1]):
            endpoint = model.endpoint([ScriptedTurn.model_validate(turn) for turn in turns])
            print(endpoint.base_url, endpoint.key.get_secret_value(), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
anyio.run(main)
"""


@asynccontextmanager
async def scripted(*scripts: Sequence[ScriptedTurn]) -> AsyncIterator[list[Endpoint]]:
    """The scripted model in another process, an endpoint for each script."""
    turns = json.dumps([[turn.model_dump(mode="json") for turn in script] for script in scripts])
    argv = [sys.executable, "-c", SERVER, turns]
    process = await anyio.to_thread.run_sync(
        lambda: subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    assert process.stdout
    assert process.stdin
    told = [process.stdout.readline().split() for _ in scripts]
    try:
        yield [Endpoint(base_url=url, model="scripted", key=SecretStr(key), kind="scripted") for url, key in told]
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def script_of(agent: Agent, turns: int) -> list[ScriptedTurn]:
    """So many answers: write, read, and again, end."""
    assert isinstance(agent, Scriptable)
    words = agent.tool_words
    calls = [words.run("echo hello > hello.txt"), *(words.run("cat hello.txt") for _ in range(turns - 2))]
    last = (words.run(words.submit),) if words.submit else ()
    return [
        *(ScriptedTurn(tool_calls=(call,)) for call in calls),
        ScriptedTurn(text="hello.txt says hello.", tool_calls=last),
    ]


async def naked(agent: Agent, endpoint: Endpoint, provider: LocalProvider, gateway: Gateway) -> None:
    """The CLI on this machine, in a new home directory."""
    folders = [await provider.layers.ensure(layer) for layer in agent.layers()]
    assert isinstance(agent, CliAgent)
    if agent.name == "opencode":
        await naked_opencode(folders[0], endpoint)
        return

    async def record(turn: object) -> None:
        pass

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
        socket.create_server(("127.0.0.1", 0)) as sock,
    ):
        lease = gateway.lend(
            endpoint, sock, limits=Limits(), mode="transparent_proxy", record=record, classify=by_headers
        )
        async with lease as lent:
            port = sock.getsockname()[1]
            model = lent.endpoint.model_copy(update={"base_url": f"http://127.0.0.1:{port}/v1"})
            command = agent.command(AgentRun(TASK.instruction, model, "", AgentSpec(name=agent.name), home))
            for folder in folders:
                for place in folder.glob(".rollcage/*/*" if (folder / ".rollcage/agents").is_dir() else ".rollcage/*"):
                    link = Path(home, place.relative_to(folder))
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(place)
            for path, text in command.files.items():
                Path(home, path).parent.mkdir(parents=True, exist_ok=True)
                Path(home, path).write_text(text.replace(HOME, home))
            env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
            env |= {"SHELL": "/bin/bash", "TERM": "dumb"}
            env |= {name: value.replace(HOME, home) for name, value in command.env.items()}
            argv = [word.replace(HOME, home) for word in (*agent.program, *command.argv)]
            done = await anyio.run_process(argv, input=command.stdin.encode(), env=env, cwd=home, check=False)
            written = Path(home, "hello.txt")
            assert written.exists(), (argv, done)


def memory_below(pid: int) -> int:
    """Bytes of everything below a process, what is shared counted in parts."""
    below, total = {pid}, 0
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    for child in below - {pid}:
        try:
            rollup = Path(f"/proc/{child}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


async def waiting(runner: Runner, agent: Agent, fork_server: int) -> tuple[int, int]:
    """Memory of one box whose model thinks, and of each further one."""
    seen, started = [], []
    async with ScriptedModel() as model:
        endpoint = model.endpoint([ScriptedTurn(text="Too late.", delay_s=3600)])
        for number in range(WAITING):
            started.append(await runner.start(Job(task=TASK, model=endpoint, agent=AgentSpec(name=agent.name))))
            while len(model.requests(endpoint)) <= number:
                await anyio.sleep(0.1)
            await anyio.sleep(2)
            seen.append(memory_below(fork_server))
        for rollout_id in started:
            await runner.abort(rollout_id)
            await runner.wait(rollout_id)
    return seen[0], (seen[-1] - seen[0]) // (WAITING - 1)


async def measure(names: Sequence[str], rounds: int, turns: int) -> dict[str, dict[str, float]]:
    """A row for each agent."""
    settings = Settings.from_environ(os.environ)
    known = agents(settings)
    rows: dict[str, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        scripts = [script_of(known[name], turns) for name in names]
        # It was started before we are counted: it is not in our group.
        endpoints = await stack.enter_async_context(scripted(*scripts))
        cost = stack.enter_context(closing(Cost()))
        provider = await stack.enter_async_context(LocalProvider(settings.home))
        gateway = await stack.enter_async_context(Gateway.open())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = await stack.enter_async_context(Store.open(Path(folder, "log.db")))
        registry = Registry(providers={"local": provider}, agents=known, gateway=gateway)
        runner = await stack.enter_async_context(Runner.open(store, registry))
        async with provider.open(SandboxSpec()) as box:
            assert isinstance(box, LocalBox)
            fork_server = box._fork_server.pid
        sides: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]] = {name: [] for name in names}
        alone: list[tuple[float, float]] = []
        for number in range(rounds + 1):
            commands = TASK.model_copy(update={"instruction": "echo hello > hello.txt; cat hello.txt"})
            job = Job(task=commands, model=endpoints[0], agent=AgentSpec(name="shell"))

            async def shell(job: Job = job) -> None:
                assert (await runner.wait(await runner.start(job))).reward == 1.0

            alone += [await cost.caged(shell)] if number else []
            for name, endpoint in zip(names, endpoints, strict=True):
                job = Job(task=TASK, model=endpoint, agent=AgentSpec(name=name))
                ended: list[Rollout] = []

                async def caged(job: Job = job, ended: list[Rollout] = ended) -> None:
                    ended.append(await runner.wait(await runner.start(job)))

                async def bare(name: str = name, endpoint: Endpoint = endpoint) -> None:
                    await naked(known[name], endpoint, provider, gateway)

                pair = (await cost.naked(bare), await cost.caged(caged))
                (rollout,) = ended
                assert (rollout.reward, len(rollout.turns)) == (1.0, turns), (name, rollout.error)
                if number:  # the first round only warms up
                    sides[name].append(pair)
                rows[name] = {"prompt_tokens": rollout.turns[0].usage["prompt_tokens"]}
        for name in names:
            rows[name] |= _summary(sides[name], [cpu for _, cpu in alone])
            rows[name]["bytes"] = sum(_size(provider.layers.folder_of(layer)) for layer in known[name].layers())
            first, further = await waiting(runner, known[name], fork_server)
            fit = 1 + max(0, GB_8 - first) // max(further, 1)
            rows[name] |= {"waiting_bytes": first, "further_bytes": further, "in_8_gb": fit}
        wall, cpu = (statistics.median(side) for side in zip(*alone, strict=True))
        rows["shell"] = {"rollout_cpu_s": cpu, "rollout_wall_s": wall}
    return rows


def _summary(
    pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]], alone: Sequence[float]
) -> dict[str, float]:
    """`alone`: CPU of the rollouts without an agent, one for each pair."""
    beside = [(caged[1] - fixed) / bare[1] for (bare, caged), fixed in zip(pairs, alone, strict=True)]
    return {
        "naked_cpu_s": statistics.median(bare[1] for bare, _ in pairs),
        "rollout_cpu_s": statistics.median(caged[1] for _, caged in pairs),
        "cpu_ratio": statistics.median(caged[1] / bare[1] for bare, caged in pairs),
        "cpu_ratio_less_shell": statistics.median(beside),
        "naked_wall_s": statistics.median(bare[0] for bare, _ in pairs),
        "rollout_wall_s": statistics.median(caged[0] for _, caged in pairs),
        "wall_ratio": statistics.median(caged[0] / bare[0] for bare, caged in pairs),
    }


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def main() -> None:
    """Print one line per agent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="model calls of a rollout")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = anyio.run(measure, asked.names or AGENTS, asked.rounds, asked.turns)
    if asked.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        "| agent | CPU naked | rollout | ratio | less that | wall naked | rollout | ratio | first prompt | size |",
        end="",
    )
    print(" waiting | each more | in 8 GB |\n" + "|---" * 13 + "|")
    alone = rows.pop("shell")
    for name, row in rows.items():
        mb = {key: f"{row[key] / 1e6:.0f} MB" for key in ("bytes", "waiting_bytes", "further_bytes")}
        print(
            f"| `{name}` | {row['naked_cpu_s']:.2f} s | {row['rollout_cpu_s']:.2f} s | {row['cpu_ratio']:.2f} x "
            f"| {row['cpu_ratio_less_shell']:.2f} x | {row['naked_wall_s']:.2f} s | {row['rollout_wall_s']:.2f} s "
            f"| {row['wall_ratio']:.2f} x | {row['prompt_tokens']:,} | {mb['bytes']} | {mb['waiting_bytes']} "
            f"| {mb['further_bytes']} | {row['in_8_gb']:.0f} |"
        )
    print(f"\n`shell`: CPU {alone['rollout_cpu_s']:.2f} s, wall {alone['rollout_wall_s']:.2f} s")


if __name__ == "__main__":
    main()
