"""Turns what verification left behind into a reward, or says why there is none."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from rollcage.errors import ScoringError
from rollcage.types import CommandResult, Reward, Task, Trust

TEXT: Final = "reward.txt"
PARTS: Final = "reward.json"
"""Where a verifier writes its number: alone, or by parts."""
_PLAIN = re.compile(r"[+-]?[0-9]*\.?[0-9]*([eE][+-]?[0-9]+)?", re.ASCII)


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


def decided(
    task: Task, results: Sequence[CommandResult], left: Mapping[str, bytes | None]
) -> tuple[Reward | None, tuple[str, ...]]:
    """The reward, and the names of files that have no say in it. ScoringError where there is no telling.

    `left`: what lies where a reward belongs; None for what is no plain file that could be written again.
    """
    granted = reward_of(results[:-1] if task.test_script else results, None, None)
    if not results or task.reward_from == "commands":  # checks write no reward
        return granted, tuple(left)
    if task.reward_from == "harbor":
        return harbor_reward(left), ()
    if task.isolate or task.reward_from:
        return _stated(task, granted, left)
    if not task.test_script:
        return _agreed(granted, left)
    # A script is there to write a number, whatever commands beside it say; one that broke has vouched for none.
    broke = Reward(total=0) if left and results[-1].exit_code else None
    reward, ignored = _agreed(broke, left)
    return reward or granted, ignored


def harbor_reward(left: Mapping[str, bytes | None]) -> Reward:
    """By Harbor's rules: reward.json first, then reward.txt; several rewards are parts, and never summed.

    Their total is `reward` where it is among them, else their mean, which says something only of parts in [0, 1].
    """
    if PARTS in left:
        named = _parts(_plain(PARTS, left))
        total, notice = reward_of_parts(named)
        return Reward(total=total, parts=named, source="reward_json", notice=notice)
    if TEXT in left:
        return Reward(total=_number(_plain(TEXT, left)), source="reward_file")
    raise ScoringError(f"the verifier wrote neither {PARTS} nor {TEXT}: that is an error, and no 0")


def reward_of_parts(named: Mapping[str, float]) -> tuple[float, str]:
    """The total of several rewards, and what is to be known about it."""
    if "reward" in named:
        return named["reward"], ""
    if any(not 0 <= value <= 1 for value in named.values()):
        raise ScoringError(
            f"{PARTS} has several rewards ({', '.join(named)}) and none is called `reward`: not all are in [0, 1], "
            "so that their mean would say nothing",
            blame="task",
        )
    return sum(named.values()) / len(named), f"the mean of {', '.join(named)}: {PARTS} has no `reward`"


def _stated(
    task: Task, granted: Reward | None, left: Mapping[str, bytes | None]
) -> tuple[Reward | None, tuple[str, ...]]:
    """Nobody but the verifier can write there, or the task says which file is the verifier's."""
    source = task.reward_from
    if source and source not in left:
        raise ScoringError(f"the verifier wrote no {source}, which the reward is to come from")
    text = _plain(TEXT, left) if TEXT in left and source != PARTS else None
    if source == TEXT and PARTS in left:
        # The number is there: what else lies there must not take it away.
        try:
            return reward_of((), text, _plain(PARTS, left)), ()
        except ScoringError:
            return reward_of((), text, None), (PARTS,)
    reward = reward_of((), text, _plain(PARTS, left) if PARTS in left else None)
    return reward or granted, (TEXT,) if source == PARTS and TEXT in left else ()


def _agreed(granted: Reward | None, left: Mapping[str, bytes | None]) -> tuple[Reward | None, tuple[str, ...]]:
    """Whoever wrote there could be the verifier, or the code that it ran beside itself.

    So what speaks (reward.txt, reward.json, exit codes) may not contradict each other upwards: a number counts where
    nothing else says less. Whoever forges one can then only lower what it earns.
    """
    speaking: list[tuple[str, Reward]] = []
    spoiled: dict[str, ScoringError] = {}
    for name in (name for name in (TEXT, PARTS) if name in left):
        try:
            data = _plain(name, left)
            found = reward_of((), data, None) if name == TEXT else reward_of((), None, data)
        except ScoringError as error:
            spoiled[name] = error
        else:
            assert found is not None
            speaking.append((name, found))
    named = next((reward.parts for name, reward in speaking if name == PARTS), {})
    if granted is not None:
        speaking.append(("the exit codes", granted))
    least, lowest = min(speaking, key=lambda each: each[1].total, default=("", None))
    if TEXT in spoiled or (PARTS in spoiled and (not speaking or speaking[0][0] != TEXT)):
        # Spoiled, perhaps, to be spared a zero.
        if lowest is None or lowest.total > 0:
            raise next(iter(spoiled.values()))
        return lowest, tuple(spoiled)
    if lowest is None:
        return None, ()
    first, reward = speaking[0]
    if reward.total > lowest.total:
        raise ScoringError(
            f"{first} says {reward.total:g} and {least} {lowest.total:g}: the verifier's number cannot be told from "
            "one that the code under test wrote",
            remedy="say in the task where its number comes from ({reward_from}), or keep the two apart ({isolate})",
            blame="agent",
        )
    return (reward.model_copy(update={"parts": named}) if first == TEXT else reward), tuple(spoiled)


def _plain(name: str, left: Mapping[str, bytes | None]) -> bytes:
    """A verifier leaves plain files that it could write again; the code that it tests might leave something else, to
    keep the verifier from writing."""
    data = left[name]
    if data is None:
        raise ScoringError(f"{name} is no plain file that can be written; the code under test may have made it")
    return data


def with_checks(
    own: Reward | None, tests: Mapping[str, float], scores: Sequence[float], trust: Trust, *, commands: int
) -> Reward:
    """The reward of checks, and of what else the verifier found: a number that it wrote, or commands, each as one test.

    It is trusted as far as the weaker of the two.
    """
    if own is None:
        return Reward(total=sum(scores) / len(scores), parts=dict(tests), source="checks", trust=trust)
    weaker = max(trust, own.trust, key=("isolated", "in_process", "shared").index)
    if own.source != "commands":
        return own.model_copy(update={"parts": {**tests, **own.parts}, "trust": weaker})
    total = (sum(scores) + own.total * commands) / (len(scores) + commands)
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
    # JSON can name half a character (a lone surrogate), which no file that a result is written to can hold.
    return {name.encode("utf-8", "replace").decode(): float(value) for name, value in data.items()}
