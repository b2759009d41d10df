"""Hostile agents against tasks in Harbor's format: what pays where all is kept, and that none does where it is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollcage.errors import TaskError, UsageError
from rollcage.jobs import with_arguments
from rollcage.results.fold import Rollout
from rollcage.tasks import load
from rollcage.types import Limits
from support.paths import ROOT
from support.playing import Play

FOLDERS = ROOT / "tests" / "data" / "harbor"
CHECK = """#!/bin/bash
mkdir -p /logs/verifier
said=$({by}python3 -c 'print(open("/app/answer").read().strip())' 2>/dev/null)
[ ! -x /opt/judge ] || said=$(/opt/judge)
if [ "$said" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
FORGE = r"#!/bin/bash\necho 42\nmkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt\n"
LEFTOVERS = {
    "a reward that was written before": "mkdir -p /logs/verifier; echo 1 | tee /logs/verifier/reward.{txt,json}",
    "a link in place of the reward's folder": "echo 1 > /app/reward.txt; rm -rf /logs; mkdir /logs; "
    "ln -s /app /logs/verifier",
    "a link in place of the logs": "mkdir -p /app/v/verifier; echo 1 > /app/v/verifier/reward.txt; rm -rf /logs; "
    "ln -s /app/v /logs",
    "tests that were written before": r"mkdir -p /tests; printf '#!/bin/bash\necho 1 > /logs/verifier/reward.txt' "
    "> /tests/test.sh; chmod 755 /tests/test.sh; chmod 555 /tests",
    "a process that stays": "setsid bash -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; "
    "sleep 0.1; done' >/dev/null 2>&1 &",
    "a table of cron": "mkdir -p /etc/cron.d; echo '* * * * * root echo 1 > /logs/verifier/reward.txt' > /etc/cron.d/x",
    "settings of a shell": "echo 'echo 1 > /logs/verifier/reward.json' | tee -a ~/.bashrc ~/.profile",
    "a program at home, where no PATH leads": f"mkdir -p ~/.local/bin; printf '{FORGE}' > ~/.local/bin/python3; "
    "chmod 755 ~/.local/bin/python3",
}
"""They pay nowhere."""
REPLACED = {
    "settings of a user and a library that all programs load": "echo /opt/none.so > /etc/ld.so.preload; touch /root/.x",
    "a program that the verifier asks": "mkdir -p /opt; printf '#!/bin/bash\\necho 42\\n' > /opt/judge; "
    "chmod 755 /opt/judge",
}
"""The second pays where everything is kept, as in Harbor: the verifier runs what the agent left."""


def made(tmp_path: Path, cheat: str, *, kind: str = "shared") -> dict[str, object]:
    """A task of that kind whose agent plays the cheat."""
    folder = Path(shutil.copytree(FOLDERS / "greeting", tmp_path / "task"))
    by = "untrusted --timeout 20 " if kind in ("isolated", "apart") else ""
    config = {
        "shared": "",
        "narrow": "[metadata.rollcage]\nkeep = []\n",
        "isolated": "[metadata.rollcage]\nisolate = true\n",
        "apart": 'artifacts = ["/app/answer"]\n[metadata.rollcage]\nisolate = true\n[verifier]\n'
        'environment_mode = "separate"\n',
        "separate": 'artifacts = ["/app/answer"]\n[verifier]\nenvironment_mode = "separate"\n',
    }
    (folder / "task.toml").write_text(config[kind])
    (folder / "tests" / "test.sh").write_text(CHECK.format(by=by))
    file = load(folder)
    task = file.task.model_copy(update={"instruction": cheat, "limits": Limits(agent_timeout_s=60)})
    return {"task": task, "agent": "shell", "sandbox": file.sandbox}


async def judged(play: Play, tmp_path: Path, cheat: str, kind: str) -> Rollout:
    given = made(tmp_path, cheat, kind=kind)
    return await play(given.pop("task"), **given)


@pytest.mark.parametrize("name", LEFTOVERS)
async def test_what_an_agent_left_beforehand_never_pays(play: Play, tmp_path: Path, name: str) -> None:
    rollout = await judged(play, tmp_path, LEFTOVERS[name], "shared")
    assert (rollout.reward, rollout.error, rollout.trust) == (0, None, "shared"), rollout.verify


async def test_a_replaced_program_pays_where_all_is_kept_and_is_told_of(play: Play, tmp_path: Path) -> None:
    rollout = await judged(play, tmp_path, REPLACED["a program that the verifier asks"], "shared")
    assert (rollout.reward, rollout.trust) == (1, "shared"), rollout.verify
    told = [path for each in rollout.suspicions if each.code == "changed_system" for path in each.paths]
    assert any(path.startswith("/opt") for path in told), rollout.suspicions


@pytest.mark.parametrize("kind", ["narrow", "separate", "isolated", "apart"])
async def test_nothing_of_it_pays_anywhere_else(play: Play, tmp_path: Path, kind: str) -> None:
    everything = "\n".join(f"({cheat})" for cheat in (*LEFTOVERS.values(), *REPLACED.values()))
    rollout = await judged(play, tmp_path, f"{everything}\ntrue", kind)
    assert rollout.reward == 0, rollout.verify
    assert rollout.trust == ("isolated" if kind in ("isolated", "apart") else "shared")


@pytest.mark.parametrize("kind", ["shared", "narrow", "separate", "isolated", "apart"])
async def test_honest_work_earns_1_everywhere(play: Play, tmp_path: Path, kind: str) -> None:
    rollout = await judged(play, tmp_path, "echo 42 > /app/answer", kind)
    assert (rollout.reward, rollout.error) == (1, None), rollout.verify
    assert not [each for each in rollout.suspicions if each.code.startswith(("changed", "not_separated"))]


def test_a_verifier_whose_programs_are_the_agent_s_is_not_isolated(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS / "greeting", tmp_path / "task"))
    (folder / "task.toml").write_text('[metadata.rollcage]\nisolate = true\nkeep = ["/"]\n')
    with pytest.raises(TaskError, match="keep less"):
        load(folder)


def test_a_folder_that_says_nothing_of_it_can_be_isolated_by_who_runs_it() -> None:
    file = with_arguments(load(FOLDERS / "greeting"), {"isolate": True})
    assert (file.task.isolate, file.task.keep) == (True, ())
    with pytest.raises(UsageError, match="keep less"):
        with_arguments(load(FOLDERS / "greeting"), {"isolate": True, "keep": ("/",)})


async def test_in_a_box_of_its_own_an_isolated_verifier_sees_nothing_of_the_artifacts_nor_they_of_it(
    play: Play, tmp_path: Path
) -> None:
    given = made(tmp_path, "echo 42 > /app/answer", kind="apart")
    script = """cat /app/answer && exit
untrusted --timeout 20 cat /tests/test.sh && exit
said=$(untrusted --timeout 20 cat /app/answer); echo $((said == 42)) > /logs/verifier/reward.txt
"""
    (tmp_path / "task/tests/test.sh").write_text(script)
    task = load(tmp_path / "task").task.model_copy(update={"instruction": "echo 42 > /app/answer"})
    rollout = await play(task, agent="shell", sandbox=given["sandbox"])
    assert (rollout.reward, rollout.trust) == (1, "isolated"), rollout.verify


def test_an_isolated_verifier_that_works_among_its_tests_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS / "greeting", tmp_path / "task"))
    own = '[metadata.rollcage]\nisolate = true\n\n[verifier.environment]\nworkdir = "/tests"\n'
    (folder / "task.toml").write_text(own)
    with pytest.raises(TaskError, match=r"task.toml:2: isolate = true: the verifier works in /tests"):
        load(folder)
