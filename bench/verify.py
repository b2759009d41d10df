"""What keeping judge and judged apart costs: one run, interleaved rounds; compare the ratios.

    python bench/verify.py [--json] [--quick] [--before FOLDER]

A command that the judge launches beside one that it starts itself, by the launcher and from Python; and the wall time
of VERIFY beside that of another checkout (a git tag, say), each by its own `rollcage run`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from rollcage.sandboxes.base import Separation, run, sh
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, LOGS_DIR, TESTS_DIR, SandboxSpec

Result = dict[str, float]
HERE = Path(__file__).resolve().parents[1]
REWARDS = f"{LOGS_DIR}/verifier"

IN_THE_JUDGE = """
import json, subprocess, sys, time
from untrusted import run
ways = {
    "plain": lambda: subprocess.run(["true"]),
    "plain_python": lambda: subprocess.run(["python3", "-IS", "-c", "pass"]),
    "launcher": lambda: subprocess.run(["untrusted", "true"]),
    "module": lambda: run(["true"]),
}
times = {name: [] for name in ways}
for _ in range(int(sys.argv[1])):
    for name, way in ways.items():
        started = time.perf_counter()
        way()
        times[name].append(time.perf_counter() - started)
print(json.dumps(times))
"""

TASKS = {
    "commands": ["--verify", "python3 -c 'import json, unittest'", "--verify", "grep -q x a", "--verify", "test -e a"],
    "one": ["--verify", "grep -q x a"],
}


async def launches(rounds: int) -> Result:
    """Milliseconds of each way to run `true`, least and middle."""
    with tempfile.TemporaryDirectory() as name:
        async with LocalProvider(Path(name)) as provider, provider.open(SandboxSpec()) as box:
            await sh(box, f"mkdir -p ~/workdir ~/tests {REWARDS}")
            await box.checkpoint()
            division = Separation((f"{HOME}/workdir",), sealed=(TESTS_DIR,), hidden=(REWARDS,))
            async with box.separate(division) as judged:
                env = {"PATH": f"{judged.tools}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": judged.tools}
                argv = ["python3", "-c", IN_THE_JUDGE, str(rounds)]
                ran = await run(box, argv, env=env, cwd=f"{HOME}/workdir", timeout_s=600)
    times = json.loads(ran.stdout.text)
    result: Result = {}
    for way, seconds in times.items():
        result[f"{way}_min_ms"] = min(seconds) * 1000
        result[f"{way}_ms"] = statistics.median(seconds) * 1000
    return result


def verifying(checkout: Path, options: list[str], home: str) -> float:
    """Seconds that VERIFY took in one rollout of a checkout."""
    command = [sys.executable, "-m", "rollcage", "run", "--agent", "shell", "-e", "scripted", "--json"]
    command += ["--instruction", "echo x > a", *options]
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "ROLLCAGE_HOME": home}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    told = json.loads(ran.stdout)
    assert told["reward"] == 1, told
    seconds: float = told["timings"]["verify"]
    return seconds


def stages(before: Path, rounds: int) -> Result:
    """VERIFY's wall time here beside that of another checkout."""
    result: Result = {}
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        for kind, options in TASKS.items():
            pairs = [(verifying(before, options, theirs), verifying(HERE, options, ours)) for _ in range(rounds)]
            result[f"verify_{kind}_before_ms"] = statistics.median(old for old, _ in pairs) * 1000
            result[f"verify_{kind}_ms"] = statistics.median(new for _, new in pairs) * 1000
            result[f"verify_{kind}_ratio"] = statistics.median(new / old for old, new in pairs)
            result[f"verify_{kind}_least_ratio"] = min(new for _, new in pairs) / min(old for old, _ in pairs)
    return result


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--before", type=Path, help="a checkout to compare VERIFY with")
    options = parser.parse_args()
    result = anyio.run(launches, 10 if options.quick else 60)
    if options.before:
        result |= stages(options.before, 5 if options.quick else 20)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value:8.2f}")


if __name__ == "__main__":
    main()
