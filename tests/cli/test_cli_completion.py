"""Shell completion in a real bash: the script is sourced, Tab is pressed, and the word is completed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollcage.events import Ended, Queued
from rollcage.store import Store
from rollcage.store.batches import add_to_batch
from rollcage.types import Endpoint, Job, Outcome, Task
from support.commands import environ, rollcage
from support.terminal import terminal

JOB = Job(task=Task(id="t1", instruction="Do it."), model=Endpoint(base_url="http://h/v1", model="m1", kind="vllm"))


def with_command(home: Path) -> dict[str, str]:
    """The environment of a shell that finds `rollcage`."""
    program = home / "bin" / "rollcage"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m rollcage "$@"\n')
    program.chmod(0o755)
    env = environ(home)
    return {**env, "PATH": f"{program.parent}:{env['PATH']}", "PS1": "> "}


async def test_tab_completes_commands_rollouts_batches_and_what_has_a_name(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "state" / "rollouts.db") as store:
        for name in ("0a1b2c3d", "ffee0011"):
            await store.append(name, Queued(job=JOB))
            await store.append(name, Ended(outcome=Outcome.FINISHED))
        await add_to_batch(store, "nightly", "planned")
    bash = shutil.which("bash")
    assert bash
    with terminal([bash, "--norc", "--noprofile", "-i"], with_command(tmp_path), tmp_path) as shell:
        shell.type('eval "$(rollcage completion bash)"; echo sourced-$?\n')
        shell.until("sourced-0")
        shell.type("rollcage ru\t")
        shell.until("rollcage run ")
        shell.type("\x15rollcage show 0a\t")  # Ctrl-U: an empty line again
        shell.until("rollcage show 0a1b2c3d ")
        shell.type("\x15rollcage watch ff\t")
        shell.until("rollcage watch ffee0011 ")
        shell.type("\x15rollcage image bu\t")
        shell.until("rollcage image build ")
        shell.type("\x15rollcage report ni\t")
        shell.until("rollcage report nightly ")
        shell.type("\x15rollcage run --agent cl\t")
        shell.until("rollcage run --agent claude-code ")
        shell.type("\x15rollcage run --endpoint sc\t")
        shell.until("rollcage run --endpoint scripted ")
        shell.type("\x15rollcage eval x --sandbox co\t")
        shell.until("rollcage eval x --sandbox container ")
        shell.type("\x15exit\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_script(tmp_path: Path, shell: str) -> None:
    ended = rollcage(tmp_path, "completion", shell)
    assert ended.returncode == 0 and f"_ROLLCAGE_COMPLETE={shell}_complete" in ended.stdout


def test_completing_ids_without_a_log_offers_nothing_and_makes_nothing(tmp_path: Path) -> None:
    words = {"COMP_WORDS": "rollcage show ", "COMP_CWORD": "2", "_ROLLCAGE_COMPLETE": "bash_complete"}
    ended = subprocess.run(
        [sys.executable, "-m", "rollcage"], env=environ(tmp_path, words), capture_output=True, text=True, timeout=120
    )
    assert (ended.stdout.strip(), ended.stderr) == ("", "") and list(tmp_path.iterdir()) == []
