"""The judge: whose number counts, what is put back before it looks, and what the agent cannot turn into nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollcage.errors import SandboxError
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, CommandResult, Task
from support.judging import judged
from support.plain_boxes import PlainProvider


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(tmp_path_factory.mktemp("state")) as opened:
        yield opened


GRADE = f"{HOME}/grade.sh"


@pytest.mark.parametrize("number", ["0.0", "0.25", "0.7", "1"])
async def test_what_a_script_of_the_verifiers_wrote_counts(number: str, provider: LocalProvider) -> None:
    setup = (f"echo 'echo {number} > {HOME}/logs/verifier/reward.txt' > {GRADE}",)
    for verifier in ({"verify": (f"bash {GRADE}",)}, {"test_script": f"bash {GRADE}"}):
        verdict = await judged(provider, Task(instruction="true", setup=setup, **verifier))
        assert verdict.total == float(number), verifier
        assert verdict.reward is not None and verdict.reward.source == "reward_file"


async def test_a_reward_that_only_is_to_be_read_counts_where_nobody_else_could_have_made_it(
    provider: LocalProvider,
) -> None:
    task = Task(instruction="true", test_script="umask 0377; echo 0.5 > $REWARD_FILE", isolate=True)
    assert (await judged(provider, task)).total == 0.5
    verdict = await judged(provider, task.model_copy(update={"isolate": False}))
    assert verdict.error is not None and (verdict.total, verdict.error.blame) == (None, "agent")


async def test_a_reward_that_the_judged_code_wrote_is_no_number(provider: LocalProvider) -> None:
    forge = "echo 'echo 1 > ~/logs/verifier/reward.txt; exit 1' > work.sh"
    for commands in (("bash work.sh", "true"), ("bash work.sh",)):
        verdict = await judged(provider, Task(instruction=forge, verify=commands))
        assert verdict.error is not None and verdict.error.blame == "agent" and "cannot be told" in str(verdict.error)
        assert [each.code for each in verdict.suspicions] == ["reaches_for_judge", "foreign_reward"]
    sure = await judged(provider, Task(instruction=forge, verify=("bash work.sh",), reward_from="commands"))
    assert (sure.total, sure.suspicions[-1].code) == (0, "foreign_reward")
    own = await judged(
        provider, Task(instruction="true", verify=('echo 3 > "$REWARD_FILE"; exit 1',), reward_from="reward.txt")
    )
    assert own.total == 3


async def test_a_command_that_a_signal_killed_vouches_for_nothing(provider: LocalProvider) -> None:
    write = 'echo 1 > "$REWARD_FILE"'
    killed = await judged(provider, Task(instruction="true", verify=(f"{write}; kill -9 $$",)))
    assert killed.total == 0
    script = await judged(provider, Task(instruction="true", test_script=f"{write}; kill -9 $$"))
    assert script.error is not None and script.error.blame == "agent" and "exit code 137" in str(script.error)
    before = await judged(
        provider, Task(instruction="true", verify=('echo 0.25 > "$REWARD_FILE"', f"{write}; kill -9 $$", "true"))
    )
    assert before.total == 0.25
    verify = ("kill -9 $$", 'echo 0.75 > "$REWARD_FILE"')
    crashed = await judged(provider, Task(instruction="true", verify=verify, reward_from="reward.txt"))
    assert crashed.total == 0.75, "a program that crashed does not take the verdict of others away"


@pytest.mark.parametrize("verify_in", ["box", "fresh"])
async def test_tests_are_sealed_unless_a_verifier_builds_among_them(verify_in: str, provider: LocalProvider) -> None:
    build = Task(
        instruction="true",
        verify=('echo built > "$TESTS_DIR/new"', 'cat "$TESTS_DIR/given"; echo x > "$TESTS_DIR/given"'),
        tests={"given": "given\n"},
        verify_in=verify_in,
    )
    sealed = await judged(provider, build)
    assert [(each.exit_code, each.stdout) for each in sealed.commands] == [(1, ""), (1, "given\n")]
    opened = await judged(provider, build.model_copy(update={"seal_tests": False}))
    assert opened.total == 1


async def test_no_command_reads_modules_that_an_earlier_one_compiled(provider: LocalProvider) -> None:
    plant = """
        import importlib.util, os, sys, time
        found = importlib.util.find_spec("colorsys")
        spoiled = compile("planted = True", found.origin, "exec")
        import marshal
        head = importlib.util.MAGIC_NUMBER + (3).to_bytes(4, "little") + bytes(8)
        for prefix in {sys.pycache_prefix, *(f"/tmp/{n}" for n in os.listdir("/tmp"))}:
            sys.pycache_prefix = prefix
            path = importlib.util.cache_from_source(found.origin)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "wb").write(head + marshal.dumps(spoiled))
    """
    lines = "\n".join(line[8:] for line in plant.strip("\n").splitlines())
    task = Task(
        instruction=f"cat > work.py <<'E'\n{lines}\nE",
        verify=("python3 work.py", "python3 -c 'import colorsys; assert not hasattr(colorsys, \"planted\")'"),
    )
    assert (await judged(provider, task)).total == 1


@pytest.mark.parametrize("verify_in", ["box", "fresh"])
async def test_no_command_finds_what_an_earlier_one_left_but_in_the_work(
    verify_in: str, provider: LocalProvider
) -> None:
    plant = "echo x | tee ~/.bashrc ~/made /tmp/left /dev/shm/left ~/tests/left ~/logs/left > handed_on; rm -r ~/folder"
    task = Task(
        instruction="true",
        setup=("echo setup > ~/made; mkdir ~/folder; echo kept > ~/kept",),
        keep=(f"{HOME}/kept",),
        verify=(
            f"{plant}; mkdir ~/folder; echo new >> ~/kept; echo 1 > $REWARD_FILE",
            "! ls ~/.bashrc /tmp/left /dev/shm/left ~/logs/left ~/tests/left",
            "! grep -x x ~/made",
            "grep -qx x handed_on && grep -qx new ~/kept && grep -qx 1 $REWARD_FILE",
        ),
        verify_in=verify_in,
    )
    verdict = await judged(provider, task)
    assert [each.exit_code for each in verdict.commands] == [0, 0, 0, 0], verdict.commands
    hidden = task.model_copy(update={"isolate": True, "verify": (*task.verify[:2], "! ls handed_on", "ls ~/kept")})
    assert (await judged(provider, hidden)).total == 1


REPOSITORY = "git init -q . && git config user.email a@b && git config user.name a"
REPOSITORY += " && echo a > a && git add a && git commit -qm a"
CLEAN = "git config filter.x.clean 'touch /tmp/ran; cat'; echo b > a; echo '* filter=x'"
FILTERS = {
    "an external diff": "git config diff.external 'touch /tmp/ran; true'; echo b > a",
    "a filter": f"{CLEAN} > .gitattributes",
    "attributes": f"{CLEAN} > .git/info/attributes",
    "a repository made anew": "rm -rf .git; git init -q .; git config diff.external 'touch /tmp/ran; true'; git add .",
    "a pager": "git config core.pager 'touch /tmp/ran; cat'; git config pager.diff true; echo b > a",
}


@pytest.mark.parametrize("verify_in", ["box", "fresh"])
@pytest.mark.parametrize("trick", FILTERS)
async def test_a_repository_of_setups_runs_nothing_of_the_agents(
    trick: str, verify_in: str, provider: LocalProvider
) -> None:
    look = "git status >/dev/null; git diff >/dev/null; git add -A; test ! -e /tmp/ran"
    task = Task(instruction=FILTERS[trick], setup=(REPOSITORY,), verify=(look,), verify_in=verify_in)
    assert (await judged(provider, task)).total == 1


@pytest.mark.parametrize("verify_in", ["box", "fresh"])
async def test_a_repository_of_the_agents_and_its_commits_stay(verify_in: str, provider: LocalProvider) -> None:
    task = Task(instruction=REPOSITORY, verify=("git log --oneline && git config user.name",), verify_in=verify_in)
    assert (await judged(provider, task)).total == 1
    commit = "echo b > b && git add b && git commit -qm b"
    again = Task(instruction=commit, setup=(REPOSITORY,), verify=("git log -1 --format=%s | grep -qx b",))
    assert (await judged(provider, again.model_copy(update={"verify_in": verify_in}))).total == 1
    settings = Task(instruction="git config a.b c", setup=(REPOSITORY,), verify=("git config a.b",), restore=())
    assert (await judged(provider, settings.model_copy(update={"verify_in": verify_in}))).total == 1


@pytest.mark.parametrize("verify_in", ["box", "fresh", "another backend"])
async def test_named_paths_are_put_back(verify_in: str, provider: LocalProvider) -> None:
    task = Task(
        instruction="echo evil > tests/t; rm package.json; echo x > conftest.py; ln -s tests more; echo work > a",
        setup=("mkdir tests; echo good > tests/t; echo good > package.json; echo old > a; ln -s a link",),
        restore=("tests", "package.json", "conftest.py", "more", "link"),
        verify=("grep -qx good tests/t && grep -qx good package.json && grep -qx work a", "! ls conftest.py more"),
    )
    if verify_in == "another backend":
        verdict = await judged(PlainProvider(provider), task)
    else:
        verdict = await judged(provider, task.model_copy(update={"verify_in": verify_in}))
    assert verdict.total == 1, verdict


@pytest.mark.parametrize("path", ["../tests", "/etc/passwd", f"{HOME}/elsewhere", "."])
def test_only_paths_of_the_work_can_be_put_back(path: str) -> None:
    with pytest.raises(ValueError, match="restore"):
        Task(instruction="x", restore=(path,))


async def test_a_box_that_cannot_keep_them_apart_refuses_the_launcher_and_says_so_else(provider: LocalProvider) -> None:
    plain = PlainProvider(provider)
    for task in (Task(instruction="x", verify=("untrusted true",)), Task(instruction="x", isolate=True, verify=("x",))):
        with pytest.raises(SandboxError, match="rollcage doctor"):
            await judged(plain, task)
    verdict = await judged(plain, Task(instruction="true", verify=("true",)))
    assert (verdict.total, [each.code for each in verdict.suspicions]) == (1, ["not_separated"])


async def test_without_verifier_there_is_no_verdict(provider: LocalProvider) -> None:
    verdict = await judged(provider, Task(instruction="true"))
    assert (verdict.reward, verdict.error, verdict.commands) == (None, None, ())
    assert CommandResult(command="x", exit_code=0)
