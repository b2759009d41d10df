"""Hostile programs under a verifier that launches them by `untrusted`: none pays, and none turns its zero into nothing.

Honest work earns 1 in every style, by the same table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import Check, Task
from support.judge_cheats import HONEST, PLANTS, PROGRAMS, SPEC, STYLES, attempt, program
from support.judging import judged


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(tmp_path_factory.mktemp("state")) as opened:
        yield opened


@pytest.mark.parametrize("style", ["a script that writes a reward", "a Python program that sees no work"])
@pytest.mark.parametrize("cheat", PROGRAMS)
async def test_a_hostile_program_earns_a_zero_and_no_more(cheat: str, style: str, provider: LocalProvider) -> None:
    verdict = await judged(provider, attempt(style, program(PROGRAMS[cheat])), SPEC)
    assert verdict.total == 0, verdict


@pytest.mark.parametrize("style", ["a pipe of commands", "a Python program that sees no work"])
@pytest.mark.parametrize("plant", PLANTS)
async def test_what_an_agent_leaves_for_the_judge_earns_a_zero(plant: str, style: str, provider: LocalProvider) -> None:
    verdict = await judged(provider, attempt(style, PLANTS[plant]), SPEC)
    assert verdict.total == 0, verdict


QUICK = ("looks for the tests", "writes the reward where it lies", "kills everything", "takes the workdir away")
"""Tried in fresh boxes every time; CI tries the others there too."""


@pytest.mark.parametrize(
    "cheat", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*PROGRAMS, *PLANTS)]
)
async def test_the_same_in_a_fresh_box(cheat: str, provider: LocalProvider) -> None:
    work = program(PROGRAMS[cheat]) if cheat in PROGRAMS else PLANTS[cheat]
    style = list(STYLES)[1 + [*PROGRAMS, *PLANTS].index(cheat) % 2]
    style = "a script that writes a reward" if cheat in QUICK else style
    assert (await judged(provider, attempt(style, work, "fresh"), SPEC)).total == 0


@pytest.mark.parametrize("verify_in", ["box", "fresh"])
@pytest.mark.parametrize("style", STYLES)
async def test_honest_work_earns_its_reward_in_every_style(style: str, verify_in: str, provider: LocalProvider) -> None:
    verdict = await judged(provider, attempt(style, program(HONEST), verify_in), SPEC)
    assert verdict.total == 1, verdict
    assert verdict.reward is not None
    assert verdict.reward.trust == ("isolated" if STYLES[style].isolate else "shared")
    assert not verdict.suspicions


LOOP = """
    while read -r a b wanted; do
        test "$(untrusted --timeout 4 python3 add.py $a $b)" = "$wanted" || { echo 0 > "$REWARD_FILE"; exit; }
    done <<END
2 3 5
4 5 9
END
    echo 1 > "$REWARD_FILE"
"""


PIPED = """
    printf '2 3 5\\n4 5 9\\n' | {
        while read -r a b wanted; do
            test "$(untrusted --timeout 4 python3 add.py $a $b)" = "$wanted" || exit 1
        done
    } && echo 1 > "$REWARD_FILE" || echo 0 > "$REWARD_FILE"
"""


@pytest.mark.parametrize("loop", [LOOP, PIPED], ids=["here", "piped"])
@pytest.mark.parametrize(("tail", "reward"), [("print(int(a) + int(b))", 1), ("print(5); sys.stdin.read()", 0)])
async def test_a_program_cannot_end_the_loop_that_tries_it(
    tail: str, reward: float, loop: str, provider: LocalProvider
) -> None:
    work = f"echo 'import sys; a, b = sys.argv[1:]; {tail}' > add.py"
    verdict = await judged(provider, Task(instruction=work, test_script=loop), SPEC)
    assert verdict.total == reward, verdict


async def test_what_the_verifiers_environment_holds_is_not_handed_on(provider: LocalProvider) -> None:
    task = Task(
        instruction="printf '#!/bin/sh\\nenv\\n' > answer; chmod 755 answer",
        verify=('said=$(untrusted ./answer); test "$KEY" = 7731 && ! grep -E "KEY|7731|TESTS_DIR" <<< "$said"',),
        verify_env={"KEY": "7731"},
    )
    assert (await judged(provider, task, SPEC)).total == 1


async def test_the_monitor_of_a_repository_within_the_workdir_is_not_run_for_the_patch(provider: LocalProvider) -> None:
    commit = "git init -q && echo 1 > file && git add . && git -c user.name=a -c user.email=a@b commit -qm1"
    monitor = "printf '#!/bin/sh\\necho 1 > ~/planted\\n' > monitor && chmod 755 monitor"
    task = Task(
        setup=(f"mkdir sub && cd sub && {commit}",),
        instruction=f'{monitor} && git -C sub config core.fsmonitor "$PWD/monitor" && echo 2 >> sub/file',
        verify=("test -e ~/planted",),
        isolate=True,
    )
    assert (await judged(provider, task, SPEC)).total == 0


async def test_a_command_that_hands_its_streams_to_another_is_over_when_it_ends(provider: LocalProvider) -> None:
    holder = "s.bind('\\0held'); s.listen(); print(1, flush=True); c, _ = s.accept(); recv_fds(c, 9, 9); sleep(600)"
    giver = "s.connect('\\0held'); print('given', flush=True); send_fds(s, [b'x'], [0, 1, 2])"
    begin = "from socket import *; from time import sleep; s = socket(AF_UNIX); "
    hold = "coproc untrusted --timeout 50 python3 holder.py && read -r -u ${COPROC[0]}"
    task = Task(
        instruction=f'echo "{begin}{holder}" > holder.py; echo "{begin}{giver}" > giver.py',
        verify=(f'{hold} && test "$(untrusted python3 giver.py)" = given && kill $COPROC_PID',),
        isolate=True,
    )
    verdict = await judged(provider, task, SPEC)
    assert verdict.total == 1, verdict


async def test_code_that_closes_the_workdir_is_not_taken_for_a_box_that_lacks_pytest(provider: LocalProvider) -> None:
    checks = (Check(kind="command", command="chmod 0 .; false"), Check(kind="pytest", path="test_it.py"))
    task = Task(instruction="true", tests={"test_it.py": "def test_it(): pass"}, checks=checks)
    assert (await judged(provider, task, SPEC)).total == 0


async def test_a_package_that_is_a_link_to_the_workdir_does_not_run_in_the_judge(provider: LocalProvider) -> None:
    plant = "if (process.env.REWARD_FILE) fs.writeFileSync(process.env.REWARD_FILE, '1')"
    seen = "import test from 'node:test'; import assert from 'node:assert'; import pack from 'pack';"
    check = Check(kind="node", path="a.test.mjs", isolation="proxied", expect=("a.test.mjs > adds",))
    task = Task(
        setup=("mkdir ~/node_modules && ln -s ~/workdir ~/node_modules/pack",),
        instruction=f"echo \"const fs = require('fs'); {plant}; exports.v = 1\" > index.js",
        tests={"a.test.mjs": f"{seen} test('adds', () => assert.equal(pack.v, 2))"},
        checks=(check,),
    )
    verdict = await judged(provider, task, SPEC)
    assert verdict.total == 0, verdict
    # The plant speaks of the reward; that is all that there is to suspect: it forged nothing.
    assert [suspicion.code for suspicion in verdict.suspicions] == ["reaches_for_judge"]
    task = task.model_copy(update={"instruction": "echo 'exports.v = 2' > index.js"})
    assert (await judged(provider, task, SPEC)).total == 1


async def test_a_proxied_check_refuses_an_interpreter_of_the_agents(provider: LocalProvider) -> None:
    check = Check(kind="pytest", path="test_it.py", isolation="proxied", interpreter="/home/user/workdir/python")
    forge = "printf '#!/bin/sh\\necho 1 > $REWARD_FILE\\n' > python && chmod 755 python"
    task = Task(instruction=forge, tests={"test_it.py": "def test_it(): pass"}, checks=(check,))
    # Put back before, code under test could change it while it is judged.
    for restore in (None, ("python",)):
        verdict = await judged(provider, task.model_copy(update={"restore": restore}), SPEC)
        assert verdict.total is None and verdict.error is not None and verdict.error.blame == "task"


async def test_a_proxied_check_refuses_an_interpreter_that_a_link_of_setups_leads_to(provider: LocalProvider) -> None:
    check = Check(kind="unittest", path="test_it.py", isolation="proxied", interpreter="/home/user/python")
    forge = "printf '#!/bin/sh\\necho ran > ran\\n' > bin/python && chmod 755 bin/python"
    task = Task(
        setup=("mkdir bin && cp /usr/bin/python3 bin/python && ln -s ~/workdir/bin/python ~/python",),
        instruction=forge,
        tests={"test_it.py": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): pass\n"},
        checks=(check,),
        verify=("test ! -e ran",),
    )
    verdict = await judged(provider, task)
    assert verdict.error is not None and (verdict.total, verdict.error.blame) == (None, "task")
    assert "leads to /home/user/workdir/bin/python, where the agent can change it" in verdict.error.message
    elsewhere = task.model_copy(update={"setup": ("ln -s /usr/bin/python3 ~/python; mkdir bin",)})
    assert (await judged(provider, elsewhere)).total == 1


async def test_git_takes_its_settings_from_no_other_repository_of_the_agents(provider: LocalProvider) -> None:
    forge = "printf '#!/bin/sh\\necho forged\\n' > forge && chmod 755 forge && cp -r .git other && echo 2 > file"
    task = Task(
        setup=("git init -q && echo 1 > file && git add file",),
        instruction=f'{forge} && git config -f other/config diff.external "$PWD/forge"; echo ../other > .git/commondir',
        verify=("git diff | grep forged",),
    )
    assert (await judged(provider, task, SPEC)).total == 0
