"""Hostile programs under a verifier that launches them by `untrusted`: none pays, and none turns its zero into nothing.

The work is a program that adds two numbers. Each cheat is such a program, or something an agent leaves beside it; the
verifiers below are of the styles that people write. Honest work earns 1 in every style, by the same table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import Check, SandboxSpec, Task
from support.judging import judged

HONEST = "import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b)\nopen('out.txt', 'w').write(str(a + b))\n"
CASES = {"in_7731.txt": "2 3\n", "expected_7731.txt": "5\n"}

STYLES = {
    "a pipe of commands": Task(
        instruction="-",
        verify=(
            'untrusted --timeout 4 python3 solve.py < "$TESTS_DIR/in_7731.txt" | diff - "$TESTS_DIR/expected_7731.txt"',
        ),
        tests=CASES,
    ),
    "a script that writes a reward": Task(
        instruction="-",
        test_script="""
            said=$(untrusted --timeout 4 --max-output 1M python3 solve.py < "$TESTS_DIR/in_7731.txt" | tail -c 100)
            if [ "$said" = "$(cat "$TESTS_DIR/expected_7731.txt")" ]; then echo 1; else echo 0; fi > "$REWARD_FILE"
        """,
        tests=CASES,
    ),
    "a Python program that sees no work": Task(
        instruction="-",
        verify=('python3 "$TESTS_DIR/check.py"',),
        tests={
            "check.py": """
import os, random
from untrusted import run
passed = 0
for _ in range(2):
    a, b = random.randrange(10**6), random.randrange(10**6)
    ended = run(["python3", "solve.py"], input=f"{a} {b}", text=True, timeout=4, max_output=1 << 20)
    left = run(["head", "-c", "100", "out.txt"], text=True, timeout=4)
    passed += ended.stdout.strip() == str(a + b) and left.stdout.strip() == str(a + b)
with open(os.environ["REWARD_FILE"], "w") as file:
    file.write(str(passed / 2))
"""
        },
        isolate=True,
    ),
}

PROGRAMS = {
    "ends at once": "raise SystemExit(0)",
    "writes the reward where it lies": """
        import os
        folder = os.path.dirname(os.environ.get("REWARD_FILE", "/home/user/logs/verifier/reward.txt"))
        os.makedirs(folder, exist_ok=True)
        for name in ("reward.txt", "reward.json"): open(f"{folder}/{name}", "w").write("1")
    """,
    "looks for the tests": """
        import os
        for top, _, names in os.walk("/"):
            if top.startswith(("/proc", "/sys", "/usr")): continue
            for name in names:
                if "7731" in name: print(open(os.path.join(top, name)).read())
    """,
    "reads the processes around it": """
        import glob
        for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/fd/*"):
            try:
                data = open(path, "rb").read(100000)
                if b"7731" in data and b"solve" not in data: print(5)
            except OSError: pass
    """,
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "kills its parents by number": """
        import os, signal
        for pid in range(1, 4000):
            if pid != os.getpid():
                try: os.kill(pid, signal.SIGKILL)
                except OSError: pass
    """,
    "kills its process group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "writes to memories": """
        import glob
        for path in glob.glob("/proc/*/mem"):
            try:
                with open(path, "r+b", buffering=0) as file: file.seek(0x400000); file.write(b"x" * 100)
            except (OSError, ValueError): pass
    """,
    "leaves a daemon that writes rewards": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            for fd in range(3): os.close(fd)
            while True:
                os.makedirs("/home/user/logs/verifier", exist_ok=True)
                open("/home/user/logs/verifier/reward.txt", "w").write("1")
                time.sleep(0.01)
    """,
    "plants start-up files": """
        import os
        site = "/home/user/.local/lib/python3.11/site-packages"
        os.makedirs(site, exist_ok=True)
        for path in (f"{site}/usercustomize.py", f"{site}/sitecustomize.py", "/tmp/untrusted.py", "/home/user/.bashrc"):
            open(path, "w").write("import os; os._exit(0)")
    """,
    "leaves the stream without waiting": """
        import fcntl, os
        for fd in range(3): fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    """,
    "prints without end": "while True: print('5' * 4000)",
    "hangs": "import time\ntime.sleep(1000)",
    "asks for launches itself": """
        import socket
        for path in ("/run/socket", "/door/socket"):
            try: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(path); print(5)
            except OSError: pass
    """,
    "lowers the limits of others": """
        import resource
        for pid in range(1, 200):
            try: resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
            except (OSError, ValueError): pass
    """,
    "fills the disk": """
        import contextlib
        for path in ("/home/user/workdir/big", "/home/user/big", "/tmp/big", "/dev/shm/big"):
            with contextlib.suppress(OSError), open(path, "wb") as file:
                for _ in range(80): file.write(bytes(1 << 20))
    """,
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "claims to be the launcher": "import os, sys\nprint('untrusted: 5', file=sys.stderr)\nos._exit(125)",
    "claims that its time ran out": "import os\nos._exit(124)",
    "dies by a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "takes the workdir away": "import shutil\nshutil.rmtree('/home/user/workdir', ignore_errors=True)",
    "closes the workdir": "import os\nos.chmod('/home/user/workdir', 0)",
    "makes its own judge's modules": """
        for name in ("untrusted", "random", "os", "sitecustomize"):
            open(f"/home/user/workdir/{name}.py", "w").write("import os as o; o._exit(0)")
    """,
    "prints what the shell would run": "print('$(echo 5)'); print('`echo 5`')",
}
PLANTS = {
    "links its answer to the tests": "echo 'print()' > solve.py; ln -s ~/tests/expected_7731.txt out.txt",
    "makes its answer a pipe": "echo 'print()' > solve.py; mkfifo out.txt",
    "makes its answer endless": "echo 'print()' > solve.py; ln -s /dev/zero out.txt",
    "makes its program a folder": "mkdir solve.py; echo 'print(5)' > out.txt",
    "makes its program a pipe": "mkfifo solve.py",
    "leaves nothing": "true",
    "removes the workdir": "cd ..; rm -rf workdir",
    "makes the workdir a link": "cd ..; rm -rf workdir; ln -s /home/user/tests workdir",
    "shadows the launcher": "mkdir run; for n in untrusted diff python3; do echo 'echo 5' > $n; chmod +x $n; done",
    "shadows modules": "for n in untrusted random os subprocess; do echo 'import os; os._exit(0)' > $n.py; done",
}


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(tmp_path_factory.mktemp("state")) as opened:
        yield opened


def program(text: str) -> str:
    """A shell script that leaves a program."""
    lines = text.strip("\n").splitlines()
    width = len(lines[0]) - len(lines[0].lstrip())
    body = "\n".join(line[width:] for line in lines)
    return f"cat > solve.py <<'END_OF_PROGRAM'\n{body}\nEND_OF_PROGRAM"


SPEC = SandboxSpec(disk_mb=64, tmp_mb=32, pids=64)


def attempt(style: str, work: str, verify_in: str = "box") -> Task:
    return STYLES[style].model_copy(update={"instruction": work, "verify_in": verify_in})


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


@pytest.mark.parametrize(
    "cheat", ["looks for the tests", "writes the reward where it lies", "kills everything", "takes the workdir away"]
)
async def test_the_same_in_a_fresh_box(cheat: str, provider: LocalProvider) -> None:
    task = attempt("a script that writes a reward", program(PROGRAMS[cheat]), "fresh")
    assert (await judged(provider, task, SPEC)).total == 0


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


@pytest.mark.parametrize(("tail", "reward"), [("print(int(a) + int(b))", 1), ("print(5); sys.stdin.read()", 0)])
async def test_a_program_cannot_end_the_loop_that_tries_it(tail: str, reward: float, provider: LocalProvider) -> None:
    work = f"echo 'import sys; a, b = sys.argv[1:]; {tail}' > add.py"
    verdict = await judged(provider, Task(instruction=work, test_script=LOOP), SPEC)
    assert verdict.total == reward, verdict


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
    verdict = await judged(provider, task, SPEC)
    assert verdict.total is None and verdict.error is not None and verdict.error.blame == "task"
    kept = task.model_copy(update={"restore": ("python",)})
    assert (await judged(provider, kept, SPEC)).total == 0, "what setup had not made is removed"


async def test_git_takes_its_settings_from_no_other_repository_of_the_agents(provider: LocalProvider) -> None:
    forge = "printf '#!/bin/sh\\necho forged\\n' > forge && chmod 755 forge && cp -r .git other && echo 2 > file"
    task = Task(
        setup=("git init -q && echo 1 > file && git add file",),
        instruction=f'{forge} && git config -f other/config diff.external "$PWD/forge"; echo ../other > .git/commondir',
        verify=("git diff | grep forged",),
    )
    assert (await judged(provider, task, SPEC)).total == 0
