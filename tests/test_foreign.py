"""Sessions in boxes of a backend that knows nothing of rollcage, and the line into such a box."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from openenv.core.harness import LoopOwningSession, VerifyResult

from foreign_backend import FolderBackend, FolderHandle
from opencode_env import (
    ExecResult,
    LocalSandboxBackend,
    OpenCodeConfig,
    OpenCodeSession,
    OpenCodeSessionFactory,
    OpenCodeTask,
    RolloutSummary,
    SandboxBackend,
    SandboxHandle,
    collect_rollout_summary,
    print_rollout_summary,
)
from opencode_env.sandbox.foreign import ForeignBox
from rollcage.agents.opencode import OpenCode
from rollcage.errors import FileMissing, SandboxError, SandboxLost
from rollcage.layers import LayerStore
from rollcage.sandboxes.base import run, sh
from rollcage.sandboxes.files import collect
from rollcage.sandboxes.machine import BOX_UID
from rollcage.testing import ScriptedModel
from rollcage.types import JsonObject, ScriptedCall, ScriptedTurn

WORKDIR = "/home/user/workdir"
WORK = "cat seed.txt given.txt > hello.txt; (setsid sleep 600 > /dev/null 2>&1 &)"
SCRIPT = (
    ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": WORK, "description": "work"}),)),
    ScriptedTurn(text="Done."),
)
TASK = OpenCodeTask(
    instruction="Write hello.",
    setup_shell=f"echo seeded > {WORKDIR}/seed.txt",
    upload_files={f"{WORKDIR}/given.txt": "given\n"},
)


def verifier(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
    done = sandbox.exec(f"cat {WORKDIR}/hello.txt")
    return VerifyResult(env_reward=float(done.stdout == "seeded\ngiven\n"), done=True)


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(ScriptedModel()) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def template(state_dir: Path) -> Path:
    """What a prebaked box of theirs would hold: the agent, where we look for it."""
    store = LayerStore(state_dir / "layers", owner=BOX_UID if os.geteuid() == 0 else None)
    return anyio.run(store.ensure, OpenCode(state_dir / "cache").layers()[0])


def config(model: ScriptedModel, script: tuple[ScriptedTurn, ...] = SCRIPT) -> OpenCodeConfig:
    endpoint = model.endpoint(script)
    key = endpoint.key.get_secret_value()
    return OpenCodeConfig(base_url=endpoint.base_url, api_key=key, model=endpoint.model, agent_timeout_s=300)


def factory(
    model: ScriptedModel, backend: SandboxBackend, sampling: dict[str, float] | None = None
) -> OpenCodeSessionFactory:
    return OpenCodeSessionFactory(
        config=config(model),
        sandbox_backend=backend,
        mode="transparent_proxy",
        verifier=verifier,
        sampling=sampling,
    )


def processes_of(folder: Path) -> list[str]:
    """What still runs on this machine with that folder for its home."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if f"HOME={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.timeout(900)
def test_a_session_runs_in_a_box_of_somebody_elses_backend(
    model: ScriptedModel, template: Path, tmp_path: Path
) -> None:
    backend = FolderBackend(tmp_path, template)
    policy = {"temperature": 0.8, "top_p": 1.0}
    session = factory(model, backend, sampling=policy).create(TASK, seed=3, episode_id="e1")
    folder = backend.handles[0].folder
    try:
        assert isinstance(session, LoopOwningSession)
        assert session.wait_for_completion() == 0, session.error
        assert session.verify(transcript=[]).env_reward == 1.0
        entries = session.fetch_proxy_trace()
        assert [len(entry["completion_token_ids"]) > 0 for entry in entries] == [True, True]
        asked = entries[0]["request"]
        assert (asked["seed"], asked["temperature"], asked["top_p"]) == (3, 0.8, 1.0)
        assert len(session.fetch_training_trace().turns) == 2
        summary = collect_rollout_summary(session)
        assert summary.workdir_contents[f"{WORKDIR}/hello.txt"] == "seeded\ngiven\n"
        assert summary.tool_calls() == ["bash"]
        printed = io.StringIO()
        print_rollout_summary(summary, stream=printed)
        assert "1: bash" in printed.getvalue()
        left = [name for name in processes_of(folder) if name.startswith("sleep 600")]
        assert not left, "what the agent left running is dead when it is over"
    finally:
        session.close()
    assert backend.orders[0]["metadata"] == {"episode_id": "e1"}
    assert not folder.exists() and processes_of(folder) == []
    assert collect_rollout_summary(session).workdir_contents == {}
    assert len(session.fetch_proxy_trace()) == 2, "what was recorded outlives the box"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_agent_is_brought_to_a_box_that_lacks_it(model: ScriptedModel, tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path)
    session = factory(model, backend).create(TASK)
    try:
        assert session.wait_for_completion() == 0, session.error
        assert session.verify(transcript=[]).env_reward == 1.0
    finally:
        session.close()


def test_what_fails_in_setup_gives_no_session_and_leaves_no_box(
    model: ScriptedModel, template: Path, tmp_path: Path
) -> None:
    backend = FolderBackend(tmp_path, template)
    with pytest.raises(RuntimeError, match=r"setup_failed.*exit code 3"):
        factory(model, backend).create({"instruction": "x", "setup_shell": "exit 3"})
    assert not list(tmp_path.iterdir()) and processes_of(backend.handles[0].folder) == []


def test_a_box_may_have_its_home_elsewhere(model: ScriptedModel, template: Path, tmp_path: Path) -> None:
    home = tmp_path / "root"
    shutil.copytree(template, home, copy_function=os.symlink)
    task = OpenCodeTask(
        instruction="x",
        upload_files={f"{home}/workdir/given.txt": "given\n", f"{home}/other.txt": "other\n"},
        setup_shell="cat given.txt ../other.txt > both.txt",
    )
    made = OpenCodeSessionFactory(
        config=config(model).model_copy(update={"sandbox_home": str(home)}), sandbox_backend=FolderBackend(tmp_path)
    )
    session = made.create(task, start_agent=False)
    try:
        assert session.sandbox.read_text(f"{home}/workdir/both.txt") == "given\nother\n"
    finally:
        session.close()


@pytest.mark.timeout(900)
def test_what_an_agent_left_is_dead_when_the_verifier_looks_even_if_it_killed_our_program(
    model: ScriptedModel, template: Path, tmp_path: Path
) -> None:
    backend = FolderBackend(tmp_path, template)
    left = "(setsid bash -c 'echo up > up; exec sleep 606' > /dev/null 2>&1 &); until [ -s up ]; do sleep 0.02; done"
    program = "for p in $(pgrep -f 'program.py serve'); do grep -qz \"HOME=$HOME\" /proc/$p/environ && kill -9 $p; done"
    work = ScriptedCall(name="bash", arguments={"command": f"{left}; {program}; sleep 600", "description": "work"})
    seen: list[str] = []

    def judge(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
        seen.extend(processes_of(backend.handles[0].folder))
        return VerifyResult(env_reward=float(sandbox.exec(f"cat {WORKDIR}/up").stdout == "up\n"), done=True)

    made = OpenCodeSessionFactory(
        config=config(model, (ScriptedTurn(tool_calls=(work,)),)), sandbox_backend=backend, verifier=judge
    )
    session = made.create(TASK)
    try:
        assert session.wait_for_completion() == 1
        assert session.error is not None and session.error.startswith("sandbox_lost: ")
        assert session.verify(transcript=[]).env_reward == 1.0
        assert seen == []
    finally:
        session.close()


def test_a_session_that_is_made_by_hand_judges_and_closes(tmp_path: Path) -> None:
    handle = FolderBackend(tmp_path).create()
    asked = OpenCodeConfig(base_url="http://127.0.0.1:9/v1")
    session = OpenCodeSession(sandbox=handle, config=asked, task=OpenCodeTask(instruction="hi"), verifier=verifier)
    assert session.initial_messages() == [{"role": "user", "content": "hi"}]
    assert session.verify(transcript=[]).env_reward == 0.0
    session.close()
    assert not handle.folder.exists()


def test_factories_can_be_sent_to_another_process(model: ScriptedModel, tmp_path: Path) -> None:
    """Trainers pickle them for their workers."""
    for backend in (FolderBackend(tmp_path), LocalSandboxBackend(state_dir=tmp_path)):
        again = pickle.loads(pickle.dumps(factory(model, backend)))
        assert isinstance(again, OpenCodeSessionFactory)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[ForeignBox]:
    handle = FolderBackend(tmp_path).create()
    opened = ForeignBox(handle, str(handle.folder))
    await opened.start()
    try:
        yield opened
    finally:
        await opened.close()
        await anyio.to_thread.run_sync(handle.kill)


def handle_of(box: ForeignBox) -> FolderHandle:
    assert isinstance(box.handle, FolderHandle)
    return box.handle


async def test_commands_have_streams_folders_environments_and_codes(box: ForeignBox) -> None:
    done = await sh(box, "echo $GREETING; pwd; cat; echo no >&2; exit 3", env={"GREETING": "salut"})
    assert (done.code, done.stdout.text, done.stderr.text) == (3, f"salut\n{box.home}\n", "no\n")
    data = secrets.token_bytes(700_000)
    echoed = await run(box, ["cat"], stdin=data, limit=8 << 20)
    assert echoed.stdout.data == data, "also more than fits into one message"
    assert (await sh(box, "kill -9 $$")).code == 137
    with pytest.raises(SandboxError, match="cannot run no-such-program"):
        await run(box, ["no-such-program"])


async def test_files_go_in_and_out(box: ForeignBox) -> None:
    await box.write("/home/user/deep/file.bin", b"\0\xff" * 50_000, mode=0o600)
    assert await box.read("/home/user/deep/file.bin") == b"\0\xff" * 50_000
    with pytest.raises(FileMissing):
        await box.read("/home/user/none")
    await box.write(f"{WORKDIR}/note.txt", b"text")
    assert (await collect(box, WORKDIR)).files == {"note.txt": "text"}


async def test_what_a_command_started_dies_with_it_and_nothing_else_does(box: ForeignBox) -> None:
    async with box.spawn(["bash", "-c", "setsid sleep 601 & echo up; read"]) as other:
        assert await other.stdout.receive() == b"up\n"
        hidden = "env -i setsid sleep 602 & setsid sleep 603 & disown -a; echo up; sleep 604"
        async with box.spawn(["bash", "-c", hidden]) as process:
            assert await process.stdout.receive() == b"up\n"
        left = await anyio.to_thread.run_sync(running_below, handle_of(box))
        assert [name for name in left if name.startswith("sleep")] == ["sleep 601"]


UP = "until [ -s up ]; do sleep 0.02; done; exit 3"
"""What it left behind runs by then, and is what it claims to be."""


async def test_what_a_command_started_dies_with_it_whosever_it_claims_to_be(box: ForeignBox) -> None:
    async with box.spawn(["bash", "-c", "echo $ROLLCAGE_COMMAND; read"]) as other:
        mark = (await other.stdout.receive()).decode().strip()
        claimed = f"ROLLCAGE_COMMAND={mark} setsid bash -c 'echo > up; exec sleep 607' > /dev/null 2>&1 & {UP}"
        assert (await sh(box, claimed)).code == 3
        left = await anyio.to_thread.run_sync(running_below, handle_of(box))
        assert [name for name in left if name.startswith(("sleep", "bash"))] == ["bash -c echo $ROLLCAGE_COMMAND; read"]


async def test_a_command_that_does_not_read_its_input_dies_with_its_block(box: ForeignBox) -> None:
    async with box.spawn(["sleep", "605"]) as process:
        # More than the program in the box holds for it; the rest waits on our side, and must not hold up its end.
        await process.stdin.send(b"x" * (20 << 16))
    assert (await sh(box, "echo well")).stdout.text == "well\n"


def running_below(handle: FolderHandle) -> list[str]:
    """What runs below the program in the box, whatever its environment."""
    script = 'pids=$1; while [ -n "$pids" ]; do pids=$(pgrep -P "$(echo $pids | tr \' \' ,)"); '
    script += 'for p in $pids; do tr "\\0" " " < /proc/$p/cmdline; echo; done; done'
    done = handle.exec(f"set -- {handle.jobs[0].pid}; {script}")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


async def test_a_port_in_the_box_leads_to_us(box: ForeignBox) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with box.listen(taken.getsockname()[1]) as listener:
            port = Path(listener.getsockname()).name
            assert port != str(taken.getsockname()[1]), "another one is found"
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer_once, listener)
                asked = await sh(box, f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo ping >&3; cat <&3")
    assert asked.stdout.text == "pong\n", asked.stderr.text


async def answer_once(listener: socket.socket) -> None:
    await anyio.wait_readable(listener)
    connection, _ = listener.accept()
    connection.setblocking(False)
    async with await anyio.abc.SocketStream.from_socket(connection) as stream:
        assert await stream.receive() == b"ping\n"
        await stream.send(b"pong\n")


async def test_answers_that_get_lost_are_asked_for_again(box: ForeignBox) -> None:
    handle, asked = handle_of(box), Counter[str]()

    def fails(cmd: str) -> ExecResult | None:
        asked[cmd] += 1
        if asked[cmd] == 1:
            return ExecResult(1, "", "no way")
        if asked[cmd] == 2:
            handle.exec(cmd)  # it is heard, but the answer gets lost
            raise ConnectionError("the answer was lost")
        return None

    handle.broken = fails
    done = await run(box, ["sh", "-c", "cat; echo end"], stdin=b"once\n")
    assert done.stdout.text == "once\nend\n"


async def test_a_box_that_is_gone_is_lost_and_not_waited_for(box: ForeignBox) -> None:
    with pytest.raises(SandboxLost, match="does not answer"):
        async with box.spawn(["sleep", "600"]) as process:
            handle_of(box).broken = lambda cmd: ExecResult(1, "", "gone")
            await process.wait()
    with pytest.raises(SandboxLost):
        await run(box, ["true"])


async def test_a_box_that_says_nonsense_is_lost(box: ForeignBox) -> None:
    name = box.line.name
    events = [{"n": 1, "id": 1, "exit": "zero"}]
    nonsense = base64.b64encode(json.dumps({"events": events, "heard": 0}).encode()).decode()
    handle_of(box).broken = lambda cmd: ExecResult(0, f"{name} {nonsense}", "")
    with pytest.raises(SandboxLost, match="no program of ours"):
        await run(box, ["true"])


async def test_a_box_that_answers_at_once_and_says_nothing_is_not_asked_without_pause(box: ForeignBox) -> None:
    empty = base64.b64encode(b'{"events": [], "heard": 0}').decode()
    asked: list[float] = []

    def at_once(cmd: str) -> ExecResult | None:
        asked.append(time.monotonic())
        return ExecResult(0, f"{box.line.name} {empty}", "")

    async with box.spawn(["bash", "-c", "until [ -e go ]; do sleep 0.02; done; echo went; read"]):
        handle_of(box).broken = at_once
        # A call that waits in the box already has its answer now; the next ones are ours to give.
        (handle_of(box).folder / "go").touch()
        while len(asked) < 5:
            await anyio.sleep(0.05)
        handle_of(box).broken = lambda cmd: None
    assert asked[4] - asked[0] > 0.5, "its pauses alone take longer"


@pytest.mark.parametrize("heard", ["NaN", "true", "1.0", "null", '"1"'])
async def test_a_count_that_is_no_number_loses_the_box(box: ForeignBox, heard: str) -> None:
    nonsense = base64.b64encode(b'{"events": [], "heard": %s}' % heard.encode()).decode()
    handle_of(box).broken = lambda cmd: ExecResult(0, f"{box.line.name} {nonsense}", "")
    with pytest.raises(SandboxLost, match="no program of ours"):
        await run(box, ["true"])


def test_a_summary_of_hostile_events_is_plain_text() -> None:
    odd: list[JsonObject] = [{}, {"type": "tool_use"}, {"type": "tool_use", "part": {"tool": "\x1b]0;owned\x07bash"}}]
    wrong = [{"type": "error", "error": {"data": data}} for data in (None, {"message": "\x1b[8m!"})]
    files = {f"{WORKDIR}/\x1b]52;c;eA==\x07\nx": "text"}
    printed = io.StringIO()
    print_rollout_summary(RolloutSummary("box\x1b[2J", [], [*odd, *wrong], "", files), stream=printed)
    assert all(line.isprintable() for line in printed.getvalue().splitlines())
    assert len(printed.getvalue().splitlines()) == 7
    assert "tool calls   2: unknown, " in printed.getvalue()


async def test_a_box_without_python_is_refused_with_the_reason(tmp_path: Path) -> None:
    handle = FolderBackend(tmp_path).create()
    handle.broken = lambda cmd: ExecResult(127, "", "bash: python3: command not found")
    opened = ForeignBox(handle, str(handle.folder))
    try:
        with pytest.raises(SandboxError, match="lacks python3"):
            await opened.start()
    finally:
        await opened.close()
        await anyio.to_thread.run_sync(handle.kill)
