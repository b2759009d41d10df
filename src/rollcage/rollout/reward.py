"""Turns what verification left behind into a reward, or says why there is none."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence

from rollcage.errors import ScoringError
from rollcage.types import CommandResult, Reward, Task, Trust

_PLAIN = re.compile(r"[+-]?[0-9]*\.?[0-9]*([eE][+-]?[0-9]+)?", re.ASCII)


def writes_reward(task: Task) -> bool:
    """Whether the task's own verifier mentions the reward file: then what lies there is its verdict, whatever it is."""
    return _speaks_of(task, "REWARD_FILE", "reward.txt")


def writes_parts(task: Task) -> bool:
    """Whether the task's own verifier mentions `reward.json`."""
    return _speaks_of(task, "reward.json")


def _speaks_of(task: Task, *words: str) -> bool:
    texts = (*task.verify, task.test_script, *task.tests.values())
    return any(word in text for text in texts for word in words)


def reward_of(results: Sequence[CommandResult], text: bytes | None, parts: bytes | None) -> Reward | None:
    """The reward: the number in the reward file, else `reward.json`, else the share of commands that passed, else none.

    `text` is the content of reward.txt and `parts` that of reward.json, each None where there is no such file.
    """
    named = _parts(parts) if parts is not None else {}
    if text is not None:
        return Reward(total=_number(text), parts=named, source="reward_file")
    if named:
        total = named["reward"] if "reward" in named else sum(named.values())
        if not math.isfinite(total):
            raise ScoringError("reward.json: the sum of its parts is no finite number")
        return Reward(total=total, parts=named, source="reward_json")
    if not results:
        return None
    passed = sum(result.exit_code == 0 for result in results)
    return Reward(total=passed / len(results), source="commands")


def believed(granted: Reward | None, claim: bytes, *, path: str, is_json: bool) -> tuple[Reward | None, bool]:
    """The reward where a reward file is there that the task does not mention, and whether that file was ignored.

    A script of the verifier's may have written it, or the code that it tests. So it may lower what the verifier granted
    and never raise it: what claims more beside a zero is ignored, and else cannot be told from a forgery.
    """
    try:
        claimed = reward_of((), None, claim) if is_json else reward_of((), claim, None)
    except ScoringError:
        claimed = None
    if claimed is not None and (granted is None or claimed.total <= granted.total):
        return claimed, False
    if granted is None or granted.total <= 0:
        return granted, True
    raise ScoringError(
        f"{path} claims more than the verify commands grant, and the task does not mention it: "
        "it cannot be told from a forged one",
        blame="agent",
    )


def with_checks(own: Reward | None, tests: Mapping[str, float], trust: Trust, *, commands: int) -> Reward:
    """The reward of checks, and of what else the verifier found: a number that it wrote, or commands, each as one test.

    It is trusted as far as the weaker of the two.
    """
    if own is None:
        return Reward(total=sum(tests.values()) / len(tests), parts=dict(tests), source="checks", trust=trust)
    weaker = max(trust, own.trust, key=("isolated", "in_process", "shared").index)
    if own.source != "commands":
        return own.model_copy(update={"parts": {**tests, **own.parts}, "trust": weaker})
    total = (sum(tests.values()) + own.total * commands) / (len(tests) + commands)
    return Reward(total=total, parts={**tests, "verify": own.total}, source="checks", trust=weaker)


def combined(environment: float | None, own: Reward | None) -> Reward | None:
    """The reward: the environment's number where it gave one, and what the task's own commands found as parts of it."""
    if environment is None:
        return own
    if not math.isfinite(environment):
        raise ScoringError(f"the environment gave {environment}, which is no reward")
    parts = {**own.parts, "verify": own.total} if own else {}
    return Reward(total=environment, parts=parts, source="environment", trust="isolated")


def _number(text: bytes) -> float:
    shown = text[:80].decode("utf-8", "replace").strip()
    try:
        value = float(shown) if _PLAIN.fullmatch(shown) else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if len(text) > 80 or not math.isfinite(value):
        raise ScoringError(f"the reward file says {shown!r}; a verifier writes one finite number there")
    return value


def _parts(text: bytes) -> dict[str, float]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScoringError(f"reward.json is no JSON: {error}") from error
    if isinstance(data, int | float) and not isinstance(data, bool):
        data = {"reward": data}
    if not isinstance(data, dict) or not data:
        raise ScoringError("reward.json must be a number or an object of numbers")
    for name, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < sys.float_info.max:
            raise ScoringError(f"reward.json: {name!r} is {str(value)[:40]}, not a finite number")
    return {name: float(value) for name, value in data.items()}
