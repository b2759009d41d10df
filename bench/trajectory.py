"""Measures merging and export: tokens per second of CPU time beside plain `json` reading of the same turns, and sizes.

    python bench/trajectory.py [--json] [--turns 40] [--rollouts 8]

The conversations are those of `bench/store.py`, whose tokens are random. Tokens are counted as they are handled: every
prompt in full, and every answer; files are measured by the tokens of the merged rows that are in them. The sizes of
`text` are those of conversations as agents have them: all begin with the same prompt and read this project's own files;
their logprobs are random still. Parquet needs `pip install 'rollcage[export]'`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rollcage.results.fold import Rollout
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.trajectory import Sequence, sequences
from rollcage.trajectory.export import open_export, rows_of
from rollcage.types import JsonObject, Outcome, Reward
from store import JOB, conversation

T = TypeVar("T")


def rollouts(count: int, turns: int) -> list[Rollout]:
    """Rollouts that earned something, each a conversation of its own."""
    return [
        Rollout(
            id=f"r{place}",
            job=JOB,
            turns=tuple(
                turn.model_copy(update={"trainable": True, "finish_reason": "tool_calls"})
                for turn in conversation(turns, seed=place)
            ),
            score=Reward(total=1.0),
            outcome=Outcome.FINISHED,
        )
        for place in range(count)
    ]


def of_text(count: int, turns: int) -> dict[str, list[JsonObject]]:
    """Rows of rollouts that begin alike and read real text: an answer of 40 to 200 tokens, then 300 of a file."""
    rng, files = random.Random(1), sorted((Path(__file__).parent.parent / "src").rglob("*.py"))
    read = [default_tokenizer().encode(file.read_text()) for file in rng.sample(files, 100)]
    read = [ids for ids in read if len(ids) > 600]
    prompt = list(itertools.chain.from_iterable(read))[:7000]
    rows: dict[str, list[JsonObject]] = {}
    (row,) = rows_of(rollouts(1, 1)[0], "sequences")
    for place in range(count):
        ids, mask, logprobs = [*prompt], [0] * len(prompt), [0.0] * len(prompt)
        for _ in range(turns):
            said, file = rng.choice(read)[: rng.randint(40, 200)], rng.choice(read)
            at = rng.randrange(len(file) - 300)
            ids += said + file[at : at + 300]
            mask += [1] * len(said) + [0] * 300
            logprobs += (
                array("f", (-rng.expovariate(1) * rng.choice([0.001, 1, 5]) for _ in said)).tolist() + [0.0] * 300
            )
        rows[f"r{place}"] = [
            {**row, "input_ids": ids, "loss_mask": mask, "logprobs": logprobs, "rollout_id": f"r{place}"}
        ]
    return rows


def timed(work: Callable[[], T], repeat: int = 5) -> tuple[float, T]:
    """The best CPU time of a few runs, and what came of the last."""
    best = float("inf")
    for _ in range(repeat):
        gc.collect()
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


def export(path: Path, rows: dict[str, list[JsonObject]]) -> int:
    """Write them all; the size of the file."""
    with open_export(path, "sequences") as file:
        for rollout_id, made in rows.items():
            file.add(rollout_id, made)
    return path.stat().st_size


def measured(made: list[Rollout], folder: Path) -> dict[str, float]:
    """All numbers."""
    handled = sum(len(turn.prompt_ids) + len(turn.tokens) for rollout in made for turn in rollout.turns)
    lines = [
        json.dumps(
            {
                "prompt_token_ids": turn.prompt_ids,
                "completion_token_ids": [token.id for token in turn.tokens],
                "logprobs": [token.logprob for token in turn.tokens],
            }
        )
        for rollout in made
        for turn in rollout.turns
    ]
    reading, _ = timed(lambda: [json.loads(line) for line in lines], 3)
    merging, merged = timed(lambda: [each for rollout in made for each in sequences(rollout)])
    row_tokens = _tokens(merged)
    numbers: dict[str, float] = {
        "turn_tokens": handled,
        "sequences": len(merged),
        "sequence_tokens": row_tokens,
        "json_read_tokens_per_s": handled / reading,
        "merge_tokens_per_s": handled / merging,
        "turns_jsonl_bytes": sum(map(len, lines)),
    }
    rows = {rollout.id: rows_of(rollout, "sequences") for rollout in made}
    text = of_text(len(made), len(made[0].turns))

    def merged_and_written(path: Path) -> int:
        return export(path, {rollout.id: rows_of(rollout, "sequences") for rollout in made})

    for ending in ("jsonl", "parquet"):
        path = folder / f"out.{ending}"
        try:
            writing, size = timed(lambda path=path: export(path, rows), 3)  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 - an extra that is not installed
            print(f"{ending}: {error}")
            continue
        both, _ = timed(lambda path=path: merged_and_written(path), 3)  # type: ignore[misc]
        # What `rollcage export` does is both: every turn is merged, and the rows that come of it are written.
        numbers[f"{ending}_export_tokens_per_s"] = row_tokens / both
        numbers[f"{ending}_write_tokens_per_s"] = row_tokens / writing
        numbers[f"{ending}_bytes"] = size
        numbers[f"{ending}_text_bytes"] = export(path, text)
    return numbers


def _tokens(merged: list[Sequence]) -> int:
    return sum(len(sequence.input_ids) for sequence in merged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--rollouts", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = measured(rollouts(options.rollouts, options.turns), Path(folder))
    if options.json:
        print(json.dumps(numbers))
        return
    for name, value in numbers.items():
        print(f"{name:28} {value:>16,.0f}")


if __name__ == "__main__":
    main()
