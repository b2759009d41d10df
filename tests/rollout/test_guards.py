"""What stands by plain verifiers: honest ones see no difference, and can do without."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec, Task
from support.judging import judged

SPEC = SandboxSpec(disk_mb=64, tmp_mb=32, pids=64)
ECHO = "echo 'import sys; print(open(sys.argv[1]).read(), end=\"\")' > show.py"
HONEST = {
    "a file of the tests as argument": Task(
        instruction=ECHO, tests={"in.txt": "5\n"}, verify=('test "$(python3 show.py "$TESTS_DIR/in.txt")" = 5',)
    ),
    "a file that the verifier made": Task(
        instruction=ECHO, verify=('echo 5 > /tmp/in; test "$(python3 show.py /tmp/in)" = 5',)
    ),
    "a variable that leads to the tests": Task(
        instruction='echo \'import os; print(open(os.environ["GIVEN"]).read(), end="")\' > show.py',
        tests={"in.txt": "5\n"},
        verify=('test "$(GIVEN="$TESTS_DIR/in.txt" python3 show.py)" = 5',),
    ),
    "a file in /tmp that was asked for": Task(
        instruction='# leave it in /tmp\necho \'open("/tmp/out", "w").write("5")\' > make.py',
        verify=('python3 make.py && test "$(cat /tmp/out)" = 5',),
    ),
    "a verifier that setup put there": Task(
        instruction="echo 5 > answer",
        setup=('echo \'import os; open(os.environ["REWARD_FILE"], "w").write(open("answer").read())\' > grade.py',),
        verify=("python3 grade.py",),
        reward_from="reward.txt",
    ),
    "a program that is changed, with its neighbours": Task(
        instruction="echo 'x = 5' > near.py; echo 'import near, sys; print(near.x + len(sys.stdin.read()))' > a.py",
        setup=("touch a.py",),
        verify=('test "$(echo | timeout 20 python3 a.py)" = 6',),
    ),
    "a module named like one of Python's": Task(
        instruction="echo 'x = 5' > queue.py; mkdir test; echo 'x = 5' > test/__init__.py",
        verify=("python3 -c 'import queue, test; assert queue.x == test.x == 5'",),
    ),
    "a program that ends itself": Task(
        instruction="echo 'import os; print(5, flush=True); os._exit(0)' > a.py; mkdir m; cp a.py m/__main__.py",
        verify=("python3 a.py", "cd / && python3 ~/workdir/a.py", "python3 -m m"),
    ),
    "processes that are forked": Task(
        instruction="printf 'import os\\nif os.fork() == 0: os._exit(0)\\nassert os.wait()[1] == 0\\n' > a.py",
        verify=("python3 -c 'import a'",),
    ),
    "a program that the image does not have": Task(
        instruction="true", verify=("! command -v python || test -x /usr/bin/python -o -x /usr/local/bin/python",)
    ),
}
FORGE = 'echo \'import os; open(os.environ["REWARD_FILE"], "w").write("1")\' > a.py'


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(tmp_path_factory.mktemp("state")) as opened:
        yield opened


@pytest.mark.parametrize("name", HONEST)
async def test_honest_work_is_paid(name: str, provider: LocalProvider) -> None:
    verdict = await judged(provider, HONEST[name], SPEC)
    assert verdict.total in (1, 5), verdict


@pytest.mark.parametrize("guards", [True, False])
async def test_a_task_can_do_without(guards: bool, provider: LocalProvider) -> None:
    task = Task(instruction=FORGE, verify=("python3 a.py",), guards=guards)
    verdict = await judged(provider, task, SPEC)
    assert (verdict.commands[0].exit_code == 0) == (not guards), "the judged is not told where the reward is"
