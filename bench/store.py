"""Measures the log: appends per second, space of a growing conversation, bytes per 1000 tokens, reading it all back.

    python bench/store.py [--json] [--turns 200]

The conversation is made up but shaped like an agent's: each turn's request repeats all earlier messages and the
tools, its prompt ids repeat the earlier prompt, and each sampled token carries five alternatives.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio

from rollcage.events import AgentEmitted, Queued, TurnEnded
from rollcage.store import Store
from rollcage.types import Alternative, Endpoint, Job, Task, Token, Turn

JOB = Job(task=Task(instruction="bench"), model=Endpoint(base_url="http://127.0.0.1:1/v1", model="none"))


def conversation(turns: int, *, tokens: int = 200, seed: int = 1, sample: int = 0) -> Iterator[Turn]:
    """The turns of one long rollout: `tokens` sampled and about 300 more of tool output per turn.

    Samples of one seed have the system prompt and the tools in common, and nothing else.
    """
    rng = random.Random(seed)
    words = [" " + "".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(20_000)]

    def draw(count: int) -> list[int]:
        return [min(int(rng.paretovariate(0.5)) * 7, 150_000 + rng.randrange(99)) % 20_000 for _ in range(count)]

    def text(ids: list[int]) -> str:
        return "".join(words[number] for number in ids)

    def token(number: int) -> Token:
        others = [number, *draw(4)]
        steps = itertools.accumulate(rng.expovariate(1) * rng.choice([0.001, 1, 5]) for _ in others)
        logprobs = [struct.unpack("f", struct.pack("f", -step))[0] for step in steps]
        top = tuple(Alternative(words[one], one, value) for one, value in zip(others, logprobs, strict=True))
        return Token(words[number], number, logprobs[0], top)

    tools = [
        {"type": "function", "function": {"name": f"tool{n}", "description": text(draw(200)), "parameters": {"n": n}}}
        for n in range(10)
    ]
    prompt = draw(6000)
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(prompt)}]
    if sample:
        rng.seed(seed + sample * 1000)
    for index in range(turns):
        said, answer = draw(tokens), draw(300)
        call = {"id": f"call_{index}", "type": "function", "function": {"name": "tool1", "arguments": text(said[-50:])}}
        message = {"role": "assistant", "content": text(said), "tool_calls": [call]}
        yield Turn(
            index=index,
            request={"model": "none", "messages": list(messages), "tools": tools, "stream": True, "logprobs": True},
            message=message,
            prompt_ids=tuple(prompt),
            tokens=tuple(map(token, said)),
            finish_reason="tool_calls",
            usage={"prompt_tokens": len(prompt), "completion_tokens": len(said)},
            status=200,
            trainable=True,
            started_at=1.7e9 + index,
            seconds=rng.random(),
        )
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": text(answer)}]
        prompt = prompt + said + answer


def size_of(folder: Path) -> int:
    """Bytes of the log's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


async def appends(folder: Path, writers: int, seconds: float) -> float:
    """Small events per second over so many writers at once, each waiting for its own append."""
    done = 0
    async with Store.open(folder / f"rate{writers}.db") as store:
        for number in range(writers):
            await store.append(f"r{number}", Queued(job=JOB))
        start = time.perf_counter()

        async def write(rollout_id: str) -> None:
            nonlocal done
            while time.perf_counter() - start < seconds:
                await store.append(rollout_id, AgentEmitted(raw={"type": "text", "text": "some words", "n": done}))
                done += 1

        async with anyio.create_task_group() as tasks:
            for number in range(writers):
                tasks.start_soon(write, f"r{number}")
        return done / (time.perf_counter() - start)


async def growth(folder: Path, turns: int) -> dict[str, float]:
    """Space and time of one growing conversation, written and read back."""
    folder.mkdir()
    path = folder / "log.db"
    async with Store.open(path) as store:
        await store.append("r", Queued(job=JOB))
    sizes = [size_of(folder)]
    raw = sampled = 0
    spent = 0.0
    rest = conversation(turns)
    for half in (turns // 2, turns - turns // 2):
        async with Store.open(path) as store:
            for turn in itertools.islice(rest, half):
                start = time.perf_counter()
                await store.append("r", TurnEnded(turn=turn))
                spent += time.perf_counter() - start
                raw += len(turn.model_dump_json())
                sampled += len(turn.tokens)
        sizes.append(size_of(folder))
    async with Store.open(path) as store:
        start = time.perf_counter()
        assert len((await store.rollout("r")).turns) == turns
        read = time.perf_counter() - start
    return {
        "turns": turns,
        "json_mb": raw / 1e6,
        "file_mb": sizes[2] / 1e6,
        "second_half_over_first_half": (sizes[2] - sizes[1]) / (sizes[1] - sizes[0]),
        "bytes_per_1000_tokens": (sizes[2] - sizes[0]) / sampled * 1000,
        "append_turn_ms": spent / turns * 1000,
        "read_all_ms": read * 1000,
    }


async def listing(folder: Path, rollouts: int) -> float:
    """Milliseconds to list 50 of so many rollouts."""
    async with Store.open(folder / "list.db") as store:
        for at in range(0, rollouts, 1000):
            async with anyio.create_task_group() as tasks:
                for number in range(at, at + 1000):
                    tasks.start_soon(store.append, f"r{number:08}", Queued(job=JOB))
        start = time.perf_counter()
        assert len(await store.list(limit=50)) == 50
        return (time.perf_counter() - start) * 1000


async def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rollouts", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {
            "appends_per_s_1": await appends(folder, 1, options.seconds),
            "appends_per_s_64": await appends(folder, 64, options.seconds),
            **await growth(folder / "growth", options.turns),
            "list_50_ms": await listing(folder, options.rollouts),
        }
    for key, value in results.items():
        print(f"{key:30} {value:12,.2f}")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    anyio.run(main)
