"""What an exact history costs beside a plain one, on a running vLLM: wall time, first token, cached prompt tokens.

    python bench/history.py http://127.0.0.1:8000/v1 MODEL [--pid PID] [--prompt 10000] [--turns 4] [--out 32] [--json]

Conversations of a few turns behind a long first message, at temperature 1, through the gateway. Plain and exact ones
take turns; each has a first message of its own, so that no cache of one serves another. Every answer has the same
number of tokens. Compare ratios, not seconds: others may use the machine too. `cpu` is the processor time of the engine
(`--pid`: the process that was started, with all below it) and of the gateway together; it does not mind others.

`first` is the turn that computes the long prompt, `later` the mean of those behind it, in seconds; `token` the time to
a later turn's first token. `cached` is the share of prompt tokens that the engine had in its cache, by its own metrics.
`added` is what finding the prompt took in each turn, `/tokenize` and all: seconds that a plain one does not have.
`joined` is the share of later turns whose prompt continues the sampled tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import anyio
import httpx

from rollcage.gateway import Gateway, app
from rollcage.gateway.engines import Engine
from rollcage.gateway.exact import ExactPrompts
from rollcage.gateway.history import PromptPlan
from rollcage.types import Endpoint, JsonObject, Limits, Turn, TurnHistory

MODES = ("as_sent", "exact")
BEYOND = "a prompt beyond the positions of the model makes nonsense: see --hf-overrides max_position_embeddings"
WORDS = "the sea and a ship went over to see what stones there were in it while rain fell".split()


@dataclass(frozen=True)
class Shape:
    """What the conversations are like."""

    prompt: int
    turns: int
    out: int


def metrics(endpoint: Endpoint) -> tuple[float, float]:
    """Prompt tokens that were looked up in the prefix cache so far, and those that were there."""
    with urllib.request.urlopen(endpoint.base_url.removesuffix("/v1") + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = [re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.M) for name in ("queries", "hits")]
    asked, hit = (sum(map(float, rows)) for rows in found)
    return asked, hit


def cpu_seconds(pid: int) -> float:
    """What a process and all that live below it have used of the processor, and this process."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], used[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    below = {pid}
    while more := {each for each, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(used.get(each, 0) for each in below) / os.sysconf("SC_CLK_TCK") + time.process_time()


class TimedPrompts(ExactPrompts):
    """Knows how long its plans took."""

    seconds: ClassVar[list[float]] = []

    async def plan(self, request: JsonObject, engine: Engine, size: int) -> PromptPlan | TurnHistory:
        """The same plan."""
        began = time.perf_counter()
        try:
            return await super().plan(request, engine, size)
        finally:
            self.seconds.append(time.perf_counter() - began)


async def conversation(endpoint: Endpoint, shape: Shape, seed: int) -> list[Turn]:
    """The turns of one conversation."""
    chance = random.Random(seed)
    turns: list[Turn] = []

    async def record(turn: Turn) -> None:
        turns.append(turn)

    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    story = " ".join(chance.choices(WORDS, k=shape.prompt))
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{seed}: {story}. Go on."}]
    limits = Limits(max_tokens_cap=shape.out)
    async with Gateway.open() as gateway, httpx.AsyncClient(timeout=None, trust_env=False) as client:
        await gateway.check(endpoint)
        async with gateway.lend(endpoint, sock, limits=limits, mode="transparent_proxy", record=record) as lease:
            headers = {"authorization": f"Bearer {lease.endpoint.key.get_secret_value()}"}
            for _ in range(shape.turns):
                body = {"model": "model", "messages": messages, "stream": True, "ignore_eos": True}
                url = f"{lease.endpoint.base_url}/chat/completions"
                (await client.post(url, json=body, headers=headers)).raise_for_status()
                said = turns[-1].message["content"].strip()
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    return turns


async def measured(endpoint: Endpoint, shape: Shape, seed: int, pid: int) -> dict[str, float]:
    """One conversation in numbers."""
    before, used = metrics(endpoint), cpu_seconds(pid)
    TimedPrompts.seconds.clear()
    turns = await conversation(endpoint, shape, seed)
    asked, hit = (now - then for now, then in zip(metrics(endpoint), before, strict=True))
    for turn in turns:
        if not turn.trainable:
            raise SystemExit(f"turn {turn.index}: {turn.untrainable_reason}; {BEYOND}")
    joined = [
        later.prompt_ids[: len(turn.prompt_ids) + len(turn.tokens)]
        == (*turn.prompt_ids, *(token.id for token in turn.tokens))
        for turn, later in pairwise(turns)
    ]
    return {
        "cpu": cpu_seconds(pid) - used,
        "wall": sum(turn.seconds for turn in turns),
        "first": turns[0].seconds,
        "later": statistics.mean(turn.seconds for turn in turns[1:]),
        "token": statistics.mean(turn.first_token_s or 0 for turn in turns[1:]),
        "added": statistics.mean(TimedPrompts.seconds or [0.0]),
        "prompt": len(turns[-1].prompt_ids),
        "cached": hit / asked if asked else 0.0,
        "joined": statistics.mean(joined),
    }


async def compare(base_url: str, model: str, shape: Shape, rounds: int, pid: int) -> dict[str, dict[str, float]]:
    """Medians of each mode."""
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for n in range(rounds):
        for at, mode in enumerate(MODES if n % 2 == 0 else reversed(MODES)):
            sampling = {"temperature": 1.0, "top_logprobs": 0, "history": mode}
            endpoint = Endpoint.model_validate(
                {"base_url": base_url, "model": model, "kind": "vllm", "sampling": sampling}
            )
            rows[mode].append(await measured(endpoint, shape, 1000 * n + at, pid))
    return {
        mode: {name: statistics.median(row[name] for row in found) for name in found[0]} for mode, found in rows.items()
    }


def main() -> None:
    """Run it and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url")
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pid", type=int, default=-1, help="the engine's first process")
    given = parser.parse_args()
    app.ExactPrompts = TimedPrompts  # type: ignore[attr-defined]
    shape = Shape(given.prompt, given.turns, given.out)
    found = anyio.run(compare, given.base_url, given.model, shape, given.rounds, given.pid)
    if given.json:
        print(json.dumps(found))
        return
    plain, exact = (found[mode] for mode in MODES)
    print(f"{'':8}{'as_sent':>10}{'exact':>10}{'ratio':>8}")
    for name, value in plain.items():
        ratio = f"{exact[name] / value:8.2f}" if value else f"{'':8}"
        print(f"{name:8}{value:10.3f}{exact[name]:10.3f}{ratio}")


if __name__ == "__main__":
    main()
