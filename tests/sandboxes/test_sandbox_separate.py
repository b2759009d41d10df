"""A divided box: what the judge launches by `untrusted` runs, and reaches nothing of the judge's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage.errors import SandboxError
from rollcage.sandboxes import launcher
from rollcage.sandboxes.base import Exit, Provider, Separable, Separation, run, sh
from rollcage.sandboxes.inside.orders import OrderTerms, read_order
from rollcage.sandboxes.local.box import LocalBox
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, LOGS_DIR, TESTS_DIR, SandboxSpec
from support.boxes import a_box, living
from support.ordinary import ordinary_user

WORKDIR = f"{HOME}/workdir"
REWARDS = f"{LOGS_DIR}/verifier"
ENV = {"PATH": "/run:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": "/run", "REWARD_FILE": f"{REWARDS}/reward.txt"}
DIVISION = Separation((WORKDIR,), sealed=(TESTS_DIR,), hidden=(REWARDS,), withheld=("REWARD_FILE",))

Judge = Callable[..., Awaitable[Exit]]


@asynccontextmanager
async def a_judge(folder: Path, division: Separation = DIVISION, **limits: Any) -> AsyncIterator[Judge]:
    """A divided box, and a way to run shell text in it as the judge."""
    async with a_box(folder, **limits) as box:
        await sh(box, "mkdir -p ~/workdir; echo work > ~/workdir/a; echo setup > ~/made")
        await box.checkpoint()
        await box.rewind((WORKDIR,))
        await box.write(f"{TESTS_DIR}/secret_4711", b"expected\n")
        await sh(box, f"mkdir -p {REWARDS}; echo mine > ~/judges_own; echo mine > /tmp/judges_tmp")
        async with box.separate(division):

            async def judge(text: str, **more: Any) -> Exit:
                return await sh(box, text, env=ENV, cwd=WORKDIR, **more)

            yield judge


def judges_of(provider: Provider, spec: SandboxSpec) -> Callable[..., AbstractAsyncContextManager[Judge]]:
    """`a_judge` for the boxes of another backend, which are not rewound before."""

    @asynccontextmanager
    async def a_judge(_: Path, division: Separation = DIVISION, **limits: Any) -> AsyncIterator[Judge]:
        async with provider.open(spec.model_copy(update=limits)) as box:
            assert isinstance(box, Separable)
            await sh(box, f"mkdir -p ~/workdir {REWARDS}; echo work > ~/workdir/a; echo setup > ~/made")
            await box.write(f"{TESTS_DIR}/secret_4711", b"expected\n")
            async with box.separate(division):
                await sh(box, "echo mine > ~/judges_own; echo mine > /tmp/judges_tmp")

                async def judge(text: str, **more: Any) -> Exit:
                    return await sh(box, text, env=ENV, cwd=WORKDIR, **more)

                yield judge

    return a_judge


async def test_a_local_box_can_be_divided(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        assert isinstance(box, Separable)


async def test_the_launcher_is_compiled_before_and_the_judge_cannot_change_it(tmp_path: Path) -> None:
    load = "from importlib.util import *; s = spec_from_file_location('u', '/run/untrusted.py'); print(s.cached)"
    async with a_judge(tmp_path) as judge:
        names = [f"/run/{name}" for name in launcher.compiled(DIVISION.max_output)]
        wanted = await judge(f'python3 -IS -c "{load}"; ls /run/__pycache__/*; echo x > {names[0]}')
        assert wanted.stdout.text.splitlines()[1:] == names
        assert "Read-only file system" in wanted.stderr.text
        if wanted.stdout.text.splitlines()[0] in names:  # a Python of the same version as ours
            ran = await judge("python3 -IS -v /run/untrusted true")
            assert f"code object from '{names[0]}'" in ran.stderr.text


async def test_streams_and_exit_codes_come_back(tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        assert (await judge("echo in | untrusted cat")).stdout.text == "in\n"
        ended = await judge("untrusted sh -c 'echo out; echo err >&2; exit 7'")
        assert (ended.code, ended.stdout.text, ended.stderr.text) == (7, "out\n", "err\n")
        assert (await judge("untrusted sh -c 'kill -9 $$'")).code == 137
        assert (await judge("untrusted no-such-program")).code == 127
        assert (await judge("untrusted seq 3 2>&1 | tac")).stdout.text == "3\n2\n1\n"
        loop = await judge("seq 3 | while read n; do untrusted echo got $n; done")
        assert loop.stdout.text == "got 1\ngot 2\ngot 3\n", "it takes no input that its command does not read"
        file = await judge("seq 3 > f; while read n; do untrusted --stdin cat; done < f; rm f")
        assert file.stdout.text == "2\n3\n3\n", "nor does it read on in a file of the judge's"
        large = await judge("head -c 30000000 /dev/zero | untrusted --max-output 1G cat | wc -c")
        assert large.stdout.text == "30000000\n"
        assert (await judge("untrusted yes | head -1")).stdout.text == "y\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "there is no command"),
        ("--scratch --", "there is no command"),
        ("--nonet ./answer", "there is no option --nonet; a command that begins with - follows --"),
        ("--timeout soon ./answer", "--timeout is 'soon', and has to be seconds, as in 2.5"),
        ("--timeout=-1 ./answer", "--timeout is '-1', and has to be seconds, as in 2.5"),
        ("--timeout", "--timeout is '', and has to be seconds, as in 2.5"),
        ("--max-output 1X ./answer", "--max-output is '1X', and has to be a number of bytes, as in 65536, 64K or 1M"),
    ],
)
async def test_a_wrong_option_is_named_and_nothing_is_started(words: str, said: str, tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        ended = await judge(f"echo 'touch begun' > answer; chmod +x answer; untrusted {words}; echo $? $(ls)")
        assert ended.stdout.text == "125 a answer\n"
        first, usage = ended.stderr.text.splitlines()
        assert first == f"untrusted: {said}"
        assert usage.startswith("usage: untrusted [--timeout S]")


@pytest.mark.parametrize(("command", "said"), [("'ls -l'", "is a text"), ("[]", "is empty")])
async def test_a_function_that_is_given_no_list_of_words_says_what_to_do(
    command: str, said: str, tmp_path: Path
) -> None:
    async with a_judge(tmp_path) as judge:
        ended = await judge(f'python3 -c "from untrusted import run; run({command})"')
        assert ended.stderr.text.endswith(
            f"ValueError: the command {said}, and has to be a list of words; ['sh', '-c', text] runs a shell's\n"
        )


@pytest.mark.parametrize("launch", ["untrusted", "timeout 50 untrusted", "x=$(untrusted", "sh -c 'untrusted"])
async def test_what_the_judge_is_reading_is_not_for_the_judged(launch: str, tmp_path: Path) -> None:
    command = f"{launch} cat{')' if '(' in launch else chr(39) if chr(39) in launch else ''}"
    body = f'do echo $n; {command}; echo "$x"; done'
    async with a_judge(tmp_path) as judge:
        for loop in (
            f"seq 3 | while read n; {body}",
            f"while read n; {body} <<E\n1\n2\n3\nE",
            f"while read n; {body} < f",
        ):
            ended = await judge(f"seq 3 > f; {loop}")
            assert ended.stdout.text.split() == ["1", "2", "3"], (loop, ended)
            assert "--stdin hands it over" in ended.stderr.text


@pytest.mark.parametrize(
    "command",
    [
        "echo in | untrusted cat",
        "echo in | timeout 50 untrusted cat",
        "echo in > f; untrusted cat < f",
        "echo in > f; f() { untrusted cat; }; f < f",
        "echo in | (untrusted --stdin cat)",
        "x=$(echo in | untrusted cat); echo $x",
        "f() { echo in | untrusted cat; }; echo other | f",
    ],
)
async def test_input_that_is_for_the_command_reaches_it(command: str, tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        ended = await judge(command)
        assert (ended.stdout.text, ended.stderr.text) == ("in\n", "")


async def test_both_work_in_the_same_workdir_and_nowhere_else(tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        await judge("untrusted sh -c 'echo new > b; echo x > ~/plant; echo x > /tmp/plant; echo evil > ~/made'")
        seen = await judge("cat a b ~/made; ls ~/plant /tmp/plant; untrusted cat a ~/made; ls -A ~")
        assert seen.stdout.text.startswith("work\nnew\nsetup\nwork\nevil\n"), "its home is its own"
        assert "plant" not in seen.stdout.text
        theirs = await judge("untrusted sh -c 'ls -A ~ ~/tests ~/logs /tmp /run; env; ls /proc | grep [0-9]'")
        for secret in ("judges_own", "judges_tmp", "secret_4711", "REWARD_FILE", "socket"):
            assert secret not in theirs.stdout.text
        assert "no such file" in theirs.stderr.text.lower()
        numbers = [line for line in theirs.stdout.text.splitlines() if line.isdigit()]
        assert 0 < len(numbers) <= 5, "it sees its own processes and no others"


async def test_the_tests_cannot_be_changed_and_the_launcher_not_be_replaced(tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        tries = "echo x >> ~/tests/secret_4711; rm ~/tests/secret_4711; touch ~/tests/new; mv ~/tests ~/t"
        ended = await judge(f"{tries}; rm -rf ~/tests; echo x > /run/untrusted; rm /run/socket; true")
        assert ended.code == 0
        assert (await judge("cat ~/tests/secret_4711; ls ~/tests")).stdout.text == "expected\nsecret_4711\n"
        assert (await judge("untrusted echo still")).stdout.text == "still\n"


async def test_no_file_that_it_is_given_can_be_opened_anew(tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        again = "for n in 0 1 2; do echo evil > /proc/self/fd/$n; done; truncate -s 0 /proc/self/fd/1; cat"
        given = await judge(
            f"echo good > /tmp/i; untrusted sh -c '{again}' < /tmp/i > /tmp/o 2>> /tmp/o; cat /tmp/i /tmp/o"
        )
        assert given.stdout.text.startswith("good\nevil\nevil\n") and "good" in given.stdout.text[5:]


async def test_time_and_output_are_bounded(tmp_path: Path) -> None:
    async with a_judge(tmp_path, DIVISION._replace(timeout_s=1.5, max_output=5000)) as judge:
        slow = await judge("untrusted --timeout=0.3 sleep 4711")
        assert (slow.code, slow.stderr.text) == (124, "untrusted: its time ran out\n")
        assert (await judge("untrusted sleep 4711")).code == 124
        assert (
            await judge("untrusted --max-output 1K yes | wc -c; echo ${PIPESTATUS[0]}")
        ).stdout.text == "1024\n153\n"
        assert (await judge("untrusted yes | wc -c")).stdout.text == "5000\n"
        assert (await judge("untrusted --max-output 20K head -c 20480 /dev/zero | wc -c")).stdout.text == "20480\n"
        assert not living("sleep 4711")


async def test_what_cannot_be_started_is_said_in_a_sentence(tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        elsewhere = await judge("cd /tmp && untrusted true && mkdir q && cd q && untrusted true")
        assert elsewhere.code == 125 and "no such folder" in elsewhere.stderr.text
        assert (await judge("untrusted true < .")).code != 0
        assert (await judge("untrusted cat <&-; untrusted echo x >&- 2>&-")).code == 0


async def test_a_scratch_copy_takes_nothing_along(tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        ended = await judge(
            "mkdir d; echo deep > d/e; untrusted --scratch sh -c 'rm -r a d; echo z > z; ls'; cat a d/e; ls"
        )
        assert ended.stdout.text == "z\nwork\ndeep\na\nd\n"


async def test_servers_are_reached_unless_the_network_is_cut(tmp_path: Path) -> None:
    async with a_judge(tmp_path) as judge:
        ask = "for i in $(seq 100); do curl -s http://127.0.0.1:8123/a && break; sleep 0.1; done"
        ask = ask.replace(
            "curl -s", "python3 -c 'import sys,urllib.request as u; print(u.urlopen(sys.argv[1]).read())'"
        )
        serve = "python3 -m http.server -b 127.0.0.1 8123 >/dev/null 2>&1"
        assert "work" in (await judge(f"untrusted {serve} & {ask} 2>/dev/null")).stdout.text
        assert "work" not in (await judge(f"untrusted --no-net {serve} & {ask.replace('100', '5')}")).stdout.text


async def test_the_judge_as_a_python_program(tmp_path: Path) -> None:
    program = """
from untrusted import run
ended = run(["cat"], input="x" * 300000, text=True)
assert (ended.returncode, len(ended.stdout), ended.stderr) == (0, 300000, ""), ended
ended = run(["sh", "-c", "echo $A; pwd; echo e >&2; exit 3"], env={"A": "b", "PATH": "/bin"}, cwd="/home/user")
assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"b\\n/home/user\\n", b"e\\n"), vars(ended)
assert run(["sleep", "50"], timeout=0.2).timed_out
assert run(["yes"], max_output=1000).truncated
assert run(["true"], cwd="/tmp/nowhere").returncode == 125
assert run(["true"], input=b"x" * 300000).returncode == 0
"""
    async with a_judge(tmp_path) as judge:
        ended = await judge(f"python3 - <<'E'\n{program}\nE")
        assert ended.code == 0, ended.stderr.text


async def test_whoever_dies_takes_what_it_launched_along(tmp_path: Path) -> None:
    # The lengths are this process's own: other tests on this machine look for theirs.
    first, second = f"sleep 4712.{os.getpid()}", f"sleep 4713.{os.getpid()}"
    async with a_judge(tmp_path) as judge:
        await judge(f"timeout 1 untrusted sh -c 'setsid {first} & {first}'")
        while living(first):  # the launcher is dead; whoever serves it sees that at its next turn
            await anyio.sleep(0.02)
        await judge(f"untrusted sh -c 'setsid {second} >/dev/null 2>&1 & exit 0'")
        assert not living(second)
        many = await judge("for i in $(seq 8); do untrusted sh -c 'sleep 0.2; echo x' & done; wait")
        assert many.stdout.text == "x\n" * 8
    assert not living(first) and not living(second)


async def test_nobody_disturbs_who_serves_it(tmp_path: Path) -> None:
    nonsense = """
import array, os, socket
def ask(data, *fds):
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.connect("/run/socket")
    door.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    return door
def file(data):
    fd = os.memfd_create("x"); os.write(fd, data); return fd
null = os.open("/dev/null", os.O_RDWR)
silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
for door in silent: door.connect("/run/socket")
pipe = os.pipe()
for fds in ([], [null], [null] * 4, [pipe[0], null, null, null], [null] * 20, [file(b"")] + [null] * 3,
            [file(b"1")] + [null] * 3, [file(b"\\0" * 9)] + [null] * 3,
            [file(b"1\\0nan\\0\\0/\\x001\\0true")] + [null] * 3,
            [file(b"1\\0\\0\\0/\\x00-1\\0true")] + [null] * 3, [file(b"1\\0\\0\\0/\\x001\\0\\xff\\xfe")] + [null] * 3,
            [file(b"x" * (3 << 20))] + [null] * 3):
    ask(b"x", *fds).recv(4096)
"""
    async with a_judge(tmp_path) as judge:
        ended = await judge(f"python3 - <<'E'\n{nonsense}\nE\nuntrusted echo served")
        assert ended.stdout.text == "served\n", ended.stderr.text


async def test_whoever_fills_the_workdir_does_not_keep_the_judge_from_writing(tmp_path: Path) -> None:
    async with a_judge(tmp_path, disk_mb=40) as judge:
        await judge("untrusted sh -c 'head -c 200M /dev/zero > big; head -c 200M /dev/zero > ~/big'")
        wrote = await judge('echo 0.5 > "$REWARD_FILE" && cat "$REWARD_FILE"')
        assert (wrote.code, wrote.stdout.text) == (0, "0.5\n")


async def test_homes_on_disk_are_divided_too(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path, on_disk=True) as provider, provider.open(SandboxSpec()) as box:
        await sh(box, f"mkdir -p ~/workdir ~/tests {REWARDS}; echo setup > ~/made")
        await box.checkpoint()
        async with box.separate(DIVISION):
            script = (
                "untrusted sh -c 'echo x > ~/made; echo y > a'; untrusted --scratch rm a; cat ~/made a; touch ~/tests/x"
            )
            ended = await sh(box, script, env=ENV, cwd=WORKDIR)
            assert (ended.code, ended.stdout.text) == (1, "setup\ny\n")


async def test_the_judge_need_not_see_the_work(tmp_path: Path) -> None:
    async with a_judge(tmp_path, DIVISION._replace(covered=(WORKDIR,))) as judge:
        ended = await judge(
            "ls -A; touch x; untrusted cat a; untrusted sh -c 'echo y > y'; untrusted ls; ls -A ~/workdir"
        )
        assert ended.stdout.text == "work\na\ny\n"


async def test_a_divided_box_is_not_divided_or_rewound_again(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        await sh(box, f"mkdir -p ~/workdir ~/tests {REWARDS}")
        await box.checkpoint()
        async with box.separate(DIVISION) as judged:
            async with judged.spawn(["sh", "-c", "cat; pwd"], cwd=WORKDIR) as process:
                await process.stdin.send(b"from here\n")
                await process.stdin.aclose()
                said = b"".join([chunk async for chunk in process.stdout])
                assert (said, await process.wait()) == (b"from here\n/home/user/workdir\n", 0)
            assert judged.launched == 0
        with pytest.raises(SandboxError, match="divided already"):
            async with box.separate(DIVISION):
                pass
        for again in (box.rewind(()), box.checkpoint()):
            with pytest.raises(SandboxError, match="it is divided"):
                await again


def test_an_order_says_what_the_judged_gets() -> None:
    data = b"1\x00\x00sn\x00/w\x002\x00a\x00b\x00PATH=/run:/bin\x00REWARD_FILE=x\x00GIT_CONFIG_COUNT=1\x00A=b=c"
    order = read_order(data, OrderTerms(9, ("REWARD_FILE", "GIT_CONFIG_*")))
    assert (order.argv, order.env, order.cwd) == (["a", "b"], {"PATH": "/bin", "A": "b=c"}, "/w")
    assert (order.timeout_s, order.scratch, order.network) == (9, True, False)


RESTORE = {
    "changed": "echo evil > .git/config; echo evil > tests/t.py; echo x > conftest.py",
    "removed": "rm -rf .git tests",
    "made anew": "rm -r .git tests; mkdir .git tests; echo evil | tee .git/config tests/t.py; touch conftest.py",
    "made links": "mv .git g; ln -s g .git; echo evil > g/config; mv tests u; ln -s u tests; ln -s a conftest.py",
    "made files": "rm -rf .git tests; touch .git tests; mkdir -p conftest.py/x",
    "made the workdir anew": "cp -r . /tmp/w; cd; rm -r workdir; cp -r /tmp/w workdir; echo evil > workdir/tests/t.py",
}


@pytest.mark.parametrize("what", RESTORE)
async def test_what_setup_made_is_put_back_whatever_became_of_it(what: str, tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        setup = "mkdir -p .git tests/sub; echo good | tee .git/config tests/t.py tests/sub/d a"
        assert (await sh(box, f"mkdir ~/workdir; cd ~/workdir; {setup}")).code == 0
        await box.checkpoint()
        await sh(box, f"{RESTORE[what]}; echo work > a; true", cwd=WORKDIR)
        await sh(box, "echo work > ~/workdir/a")
        names = (".git/config", ".git/hooks", "tests", "conftest.py", "nowhere/at/all")
        await box.rewind((WORKDIR,), [f"{WORKDIR}/{name}" for name in names])
        ended = await sh(box, "cat .git/config tests/t.py tests/sub/d a; ls -d .git tests conftest.py", cwd=WORKDIR)
        assert ended.stdout.text == "good\ngood\ngood\nwork\n.git\ntests\n", ended.stderr.text


async def test_limits_of_others_are_out_of_reach(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        lower = "sleep 9 & prlimit --pid $! --cpu=1 2>/dev/null; echo $?; ulimit -n 100 && ulimit -n; kill $!"
        assert (await sh(box, lower)).stdout.text == "1\n100\n"
        own = "import resource as r; r.setrlimit(r.RLIMIT_CPU, (50, 50)); print(r.getrlimit(r.RLIMIT_CPU))"
        assert (await run(box, ["python3", "-c", own])).stdout.text == "(50, 50)\n"


def _unused(box: LocalBox) -> Separable:
    """A local box has all that the protocol asks for, as the type checker sees it."""
    return box


IN_FLIGHT = """
import errno, socket, sys
held = []
try:
    while len(held) < 100:
        held.append(socket.socketpair())
        socket.send_fds(held[-1][0], [b"x"], [0] * 250)
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
sys.stdin.read()
"""


async def test_descriptors_that_an_agent_has_on_their_way_keep_no_other_judge_from_launching(tmp_path: Path) -> None:
    async with (
        a_judge(tmp_path / "one") as judge,
        a_box(tmp_path / "other") as hostile,
        hostile.spawn(["python3", "-c", IN_FLIGHT]) as flood,
    ):
        assert await flood.stdout.receive() == b"ETOOMANYREFS\n"
        launched = await judge("untrusted echo ran")
        assert (launched.code, launched.stdout.text) == (0, "ran\n"), launched


SHARING = """
import sys
import anyio
from pathlib import Path
from test_sandbox_separate import DIVISION, ENV, IN_FLIGHT, WORKDIR
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec


async def main():
    alone = DIVISION._replace(covered=(WORKDIR,))
    async with LocalProvider(Path(sys.argv[1])) as provider:
        async with provider.open(SandboxSpec()) as one, provider.open(SandboxSpec()) as two:
            for box in (one, two):
                await sh(box, "mkdir -p ~/workdir ~/tests ~/logs/verifier")
                await box.checkpoint()
            async with one.separate(alone), two.separate(DIVISION):
                async with two.spawn(["python3", "-c", IN_FLIGHT], env=ENV) as flood:
                    assert await flood.stdout.receive() == b"ETOOMANYREFS\\n"
                    launched = await sh(one, "untrusted echo ran", env=ENV, cwd=WORKDIR)
                    print(launched.code, launched.stdout.text)


anyio.run(main)
"""


def test_a_plain_verifier_s_code_keeps_no_isolated_judge_of_the_same_user_from_launching() -> None:
    with ordinary_user("rollcage.sandboxes.local.provider") as (python, env, home):
        tests = {"PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{Path(__file__).parent}"}
        command = [*python, "-c", SHARING, str(home / "state")]
        ran = subprocess.run(command, env={**env, **tests}, capture_output=True, text=True, timeout=120)
        assert ran.stdout == "0 ran\n\n", ran.stderr


OF_ANY_BOX: list[Callable[[Path], Awaitable[None]]] = [
    test_streams_and_exit_codes_come_back,
    test_both_work_in_the_same_workdir_and_nowhere_else,
    test_the_tests_cannot_be_changed_and_the_launcher_not_be_replaced,
    test_time_and_output_are_bounded,
    test_what_cannot_be_started_is_said_in_a_sentence,
    test_a_scratch_copy_takes_nothing_along,
    test_servers_are_reached_unless_the_network_is_cut,
    test_the_judge_as_a_python_program,
    test_whoever_dies_takes_what_it_launched_along,
    test_nobody_disturbs_who_serves_it,
    test_whoever_fills_the_workdir_does_not_keep_the_judge_from_writing,
    test_the_judge_need_not_see_the_work,
]
"""What holds in every divided box; containers and machines of E2B are held to it by these very tests."""
