"""Replays every rollout that a run of the tests made, and holds each to its original: its reward and its requests.

    make test && .venv/bin/python scripts/replay_tests.py

FOLDER: where the tests keep their logs; else where pytest leaves what its last three runs made. The last lines count
them, and those that are not replayed, with the reason. Red where one differs.
"""

from __future__ import annotations

import argparse
import getpass
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

from rollcage.errors import StoreError, UsageError
from rollcage.results.fold import Rollout
from rollcage.runner import Runner
from rollcage.runner.replay import replay
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.types import Outcome
from rollcage.wiring import opened_runner

CUT_SHORT = (
    *(Outcome.ABORTED, Outcome.CRASHED, Outcome.INTERNAL_ERROR),
    *(Outcome.SANDBOX_LOST, Outcome.TIMED_OUT, Outcome.MODEL_UNREACHABLE),
)
"""Ends that the test made from outside, and that no record holds."""
THROWS_DICE = "test_a_reference_that_does_not"
"""How the folder of the one test begins whose verifier does."""


def why_not(original: Rollout, name: str) -> str:
    """Why a rollout is not replayed; empty where it is."""
    if original.reverifies:
        return "judges stored work again, and asks no model"
    if original.origin:
        return f"is a {original.origin.how} itself"
    if original.job.mode == "black_box":
        return "was not recorded: black_box"
    if original.job.environment:
        return "works on a remote environment that lived in its test"
    if original.job.sandbox.backend == "container":
        return "works in a container whose engine lived in its test"
    if original.outcome is None or original.outcome in CUT_SHORT:
        return f"was cut short from outside: {original.outcome or 'open'}"
    if original.error_code == "verify_timeout" or any(each.timed_out for each in original.verify):
        return "was decided by a time limit of its verifier"
    if THROWS_DICE in name:
        return "its verifier throws dice"
    if not original.sandbox_id or not original.timings:
        return "never had a box, or was written by hand"
    return ""


@contextmanager
def copied(log: Path, state: Path) -> Iterator[Settings]:
    """A home with a copy of a log, with what is stored beside it, and with the layers of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name in ("rollouts.db", "rollouts.db-wal"):
            if (log.parent / name).exists():
                shutil.copy(log.parent / name, home / name)
        for name, beside in (("work", log.parent), ("trees", log.parent), ("layers", state), ("cache", state)):
            if (beside / name).is_dir():
                (home / name).symlink_to(beside / name)
        yield Settings.from_environ({}, home=folder)


async def held(runner: Runner, original: Rollout) -> str:
    """What its replay did otherwise, in words; UsageError where what it needs went with its test."""
    with anyio.move_on_after(60 + 5 * original.timings.get("total", 0)):
        played, report = await replay(runner, original)
        odd = [f"turn {each.turn}: {each.what}" for each in report.differences]
        if not report.same_reward:
            odd.append(f"reward {original.reward} -> {played.reward} ({played.error or played.outcome})")
        return "; ".join(odd)
    return "its replay does not end"


async def replayed(log: Path, name: str, asked: argparse.Namespace, counts: Counter[str]) -> None:
    """Replay what one log has, and tell of each rollout how that went."""
    with copied(log, asked.state) as settings:
        async with Store.open(settings.log_path) as store:
            originals = [await store.rollout(row.id) for row in await store.list(limit=1_000_000)]
            reasons = [why_not(original, name) for original in originals]
            counts.update(f"not replayed: {why}" for why in reasons if why)
            if all(reasons):
                return
            async with opened_runner(settings, store) as runner:
                for original in (each for each, why in zip(originals, reasons, strict=True) if not why):
                    try:
                        # A busy machine lets agents and verifiers run out of time: what differs is tried again.
                        odd = await held(runner, original) and await held(runner, original)
                    except UsageError as error:
                        counts[f"not replayed: its {error.argument} went with its test"] += 1
                        continue
                    counts["otherwise" if odd else "the same"] += 1
                    said = f"{name}: {original.id} by {original.job.agent.name}, {original.outcome}"
                    print(f"{said}: {odd or 'the same'}", flush=True)


async def main() -> int:
    """All logs below a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kept = Path(tempfile.gettempdir()) / f"pytest-of-{getpass.getuser()}"
    parser.add_argument("folder", metavar="FOLDER", type=Path, nargs="?", default=kept)
    parser.add_argument(
        "--state", type=Path, default=Settings.from_environ().home, help="where the layers of agents are"
    )
    parser.add_argument("--at-once", type=int, default=2)
    asked = parser.parse_args()
    counts, limiter = Counter[str](), anyio.CapacityLimiter(asked.at_once)

    async def one(log: Path) -> None:
        async with limiter:
            try:
                await replayed(log, str(log.parent.relative_to(asked.folder)), asked, counts)
            except StoreError as error:  # damaged on purpose, of another version
                counts[f"a log that cannot be read: {type(error).__name__}"] += 1

    async with anyio.create_task_group() as tasks:
        for log in sorted(asked.folder.rglob("rollouts.db")):
            tasks.start_soon(one, log)
    for why, number in counts.most_common():
        print(f"{number:6} {why}")
    return int(bool(counts["otherwise"]) or not counts["the same"])


if __name__ == "__main__":
    sys.exit(anyio.run(main))
