"""A small plain work is looked at without a command, and looks the same as by commands."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import anyio
import pytest

from rollcage.rollout.patch import patch_of, snapshot_workdir
from rollcage.rollout.plain import packed, plain_work
from rollcage.rollout.work import packed_in_box
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.files import collect
from rollcage.sandboxes.local.box import LocalBox
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, SandboxSpec, Task
from support.playing import Play


@pytest.fixture
async def box(state_dir: Path) -> AsyncIterator[LocalBox]:
    async with LocalProvider(state_dir) as provider, provider.open(SandboxSpec()) as opened:
        yield opened


TASK = Task(instruction="work")
WORKDIR = TASK.workdir

KINDS = r"""
mkdir -p a/b/c 'empty' __pycache__ a-b
printf 'one\n' > one.txt
printf 'one' > a/unended.txt
printf 'one\n\ntwo\r\n' > a/b/lines.txt
printf '\n' > a/b/c/newline
: > nothing
printf '\0\1' > a/binary.dat
head -c 9000 /dev/zero | tr '\0' x > a-b/late; printf '\0' >> a-b/late
printf '\377\376 no utf-8\n' > latin
head -c 300000 /dev/zero | tr '\0' y > large.txt
printf '#!/bin/sh\n' > run.sh; chmod 751 run.sh
printf 'compiled' > __pycache__/one.pyc
touch -d @1000000000 one.txt
"""


async def test_it_is_what_commands_would_say(box: LocalBox) -> None:
    remembered = await snapshot_workdir(box, WORKDIR)
    assert remembered is not None
    assert remembered.empty
    assert (await sh(box, KINDS, cwd=WORKDIR)).code == 0
    work = await plain_work(TASK, box)
    assert work is not None
    assert work.collected == await collect(box, WORKDIR)
    assert work.patch == await patch_of(box, WORKDIR, remembered)
    now = anyio.Event()
    now.set()
    assert await members(packed(WORKDIR, work.entries)) == await members(packed_in_box(box, (WORKDIR,), now))
    for place in (TASK.tests_dir, TASK.reward_dir):
        assert await box.names_in(place) == ()


async def members(chunks: AsyncGenerator[bytes, None]) -> list[tuple[object, ...]]:
    data = b"".join([chunk async for chunk in chunks])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        contents = {each.name: stream.read() for each in tar if (stream := tar.extractfile(each))}
        return sorted(
            (each.name, each.type, each.mode, each.mtime, each.uid, each.gid, contents.get(each.name, b""))
            for each in tar
        )


@pytest.mark.parametrize(
    "script",
    [
        "ln -s /etc/passwd link",
        "mkdir .venv && ln -s ../x .venv/link",
        "git init -q .",
        "mkfifo pipe",
        "echo x > a && ln a b",
        "echo x > 'a name'",
        "echo x > $'a\\nb'",
        "echo x > $'\\377'",
        "echo x > a && chmod 0 a",
        "mkdir a && chmod 0 a",
        "truncate -s 600M sparse",
        "seq 500 | xargs touch",
        "mkdir -p $(seq -s/ 40)",
        f"mkdir -p {TASK.tests_dir}",
        f"mkdir -p {HOME}/logs && ln -s /tmp {TASK.reward_dir}",
        f"rm -rf {WORKDIR}",
        f"rm -rf {WORKDIR} && ln -s {HOME} {WORKDIR}",
    ],
)
async def test_what_is_not_plain_takes_commands(box: LocalBox, script: str) -> None:
    await snapshot_workdir(box, WORKDIR)
    assert (await sh(box, script, cwd=WORKDIR)).code == 0
    assert await plain_work(TASK, box) is None


async def test_kept_paths_and_places_in_the_workdir_take_commands(box: LocalBox) -> None:
    await snapshot_workdir(box, WORKDIR)
    assert await plain_work(TASK, box) is not None
    assert await plain_work(TASK.model_copy(update={"keep": (f"{HOME}/.venv",)}), box) is None
    assert await plain_work(TASK.model_copy(update={"workdir": HOME}), box) is None


async def test_one_command_is_started_to_judge_a_plain_work(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    begin = LocalBox._begin

    async def counted(self: LocalBox, argv: list[str], *rest: object) -> object:
        began.append(argv[-1])
        return await begin(self, argv, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalBox, "_begin", counted)
    rollout = await play(Task(instruction="echo hello > hello.txt", verify=("grep -q hello hello.txt",)), agent="shell")
    assert (rollout.reward, rollout.files) == (1, {"hello.txt": "hello\n"})
    began = [each for each in began if each != "true"]  # the provider tries itself out
    assert began == ["echo hello > hello.txt", "grep -q hello hello.txt"]
    assert rollout.work is not None
