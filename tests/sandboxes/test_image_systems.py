"""Imported systems: they replace the host's, and take nothing away from the box's isolation."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
from test_sandbox_hostile import DENIED, PRELUDE

from rollcage.conformance.sandboxes import check
from rollcage.errors import SandboxError, UsageError
from rollcage.runner import Registry
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.box import LocalBox
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, SandboxSpec, ScriptedCall, ScriptedTurn, Task
from support.boxes import python
from support.commands import rollcage
from support.image_making import build, folders, imported, said, tarred
from support.judging import judged
from support.playing import Play
from support.systems import MARK, a_system

PACKAGE = "mkdir -p $(python3 -m site --user-site) && echo 'WORD = 42' > $(python3 -m site --user-site)/baked.py"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with Python, and a repository in /testbed."""
    folder = a_system(tmp_path_factory.mktemp("system"), python=True)
    (folder / "testbed/module.py").write_text("ANSWER = 1\n")
    (folder / "opt/library").mkdir()
    (folder / "opt/library/installed.pth").write_text("/testbed\n")
    return folder


async def test_a_system_of_its_own_replaces_the_host_and_keeps_every_way_out_shut(system: Path, tmp_path: Path) -> None:
    async with LocalProvider(tmp_path / "state") as provider:
        await imported(provider, "own", system)
        async with provider.open(SandboxSpec(template="own")) as box:
            assert MARK in await said(box, "cat /etc/os-release")
            assert (await said(box, "echo /usr/share /usr/bin/git* /usr/bin/apt*")).count("*") == 2
            assert (await sh(box, "echo x > /opt/x || echo x > /etc/x || echo x > /var/x || echo x > /x")).code != 0
            assert await said(box, "echo x > ~/x && cat ~/x && ls -A ~ /tmp /run /dev/shm | wc -w") == "x\n5\n"
            # These the system has of its own, or may have.
            own = {"see the host's variable data", "see the host's root", "see the machine's devices"}
            checks = {name: attempt for name, attempt in DENIED.items() if name not in own}
            with attempts(tmp_path, checks) as script:
                ran = await python(box, script)
            assert (ran.stdout.text, ran.stderr.text) == (f"{len(checks)}\n", "")
            assert await said(box, "ls -A /root /var /var/lib") == "/root:\n.profile\n\n/var:\nlib\n\n/var/lib:\n"


@contextmanager
def attempts(folder: Path, checks: dict[str, str]) -> Iterator[str]:
    """A script that tries all of these, prints the names of those that work, and how many do not."""
    (folder / "secret").write_text("secret")
    (folder / "secret").chmod(0o666)
    abstract = f"rollcage-test-{secrets.token_hex(4)}"
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as hidden:
        hidden.bind(f"\0{abstract}")
        hidden.listen()
        names = {
            "SECRET": str(folder / "secret"),
            "HOST_PID": os.getpid(),
            "HOST_PORT": server.getsockname()[1],
            "HOST_ADDRESS": "127.0.0.2",
            "ABSTRACT": abstract,
            "UNIX": f"/tmp/{abstract}",
        }
        head = PRELUDE + "".join(f"{name} = {value!r}\n" for name, value in names.items())
        tried = "".join(
            f"try:\n    {attempt}\n    print({name!r})\nexcept (OSError, ValueError):\n    refused += 1\n"
            for name, attempt in checks.items()
        )
        yield f"{head}refused = 0\n{tried}print(refused)"


@pytest.mark.parametrize("form", ["folder", "w", "w:gz", "zst"])
async def test_a_folder_and_every_kind_of_archive_give_the_same_system(system: Path, tmp_path: Path, form: str) -> None:
    path = system if form == "folder" else tarred(system, tmp_path / "x.tar", "w" if form == "zst" else form)
    if form == "zst":
        if not shutil.which("zstd"):
            pytest.skip("no zstd here")
        subprocess.run(["zstd", "-q", "-1", path], check=True)
        path = tmp_path / "x.tar.zst"
    async with LocalProvider(tmp_path / "state") as provider:
        made = await imported(provider, "own", path, workdir="/testbed", env={"PATH": "/opt/bin:$PATH", "A": "b"})
        assert made.new and made.image.whole
        assert not (
            await imported(provider, "own", path, workdir="/testbed", env=made.image.env | {"PATH": "/opt/bin:$PATH"})
        ).new
        async with provider.open(SandboxSpec(template="own")) as box:
            shown = await said(
                box, "echo $A $PATH; cat workdir/module.py; readlink /testbed; test -e /etc/shadow || echo none"
            )
        assert shown == f"b /opt/bin:/usr/local/bin:/usr/bin:/bin\nANSWER = 1\n{HOME}/workdir\nnone\n"


async def test_a_repository_of_the_image_is_worked_on_where_the_image_has_it(
    system: Path, play: Play, backends: Registry
) -> None:
    provider = backends.providers["local"]
    assert isinstance(provider, LocalProvider)
    name = f"test-{secrets.token_hex(4)}"
    await imported(provider, name, system, workdir="/testbed", writable=("/opt/library",))
    look = "python3 -c \"import site; site.addsitedir('/opt/library'); import module; assert module.ANSWER == 2\""
    command = "echo 'ANSWER = 2' > /testbed/module.py; rm /opt/library/*; cat /etc/os-release > seen.txt"
    calls = (ScriptedCall(name="bash", arguments={"command": command, "description": "work"}),)
    try:
        task = Task(
            instruction="Make the answer 2.",
            setup=("touch /opt/library/mine",),
            verify=(look, "test -e /opt/library/mine"),
            solution=(ScriptedTurn(tool_calls=calls), ScriptedTurn(text="done")),
        )
        gone = Task(instruction="rm /testbed/module.py", verify=("test ! -e module.py",), verify_in="fresh")
        rollout = await play(gone, agent="shell", sandbox=SandboxSpec(template=name))
        assert rollout.reward == 1.0, rollout
        rollout = await play(task, sandbox=SandboxSpec(template=name))
        assert rollout.reward == 1.0, rollout
        assert rollout.files["module.py"] == "ANSWER = 2\n" and MARK in rollout.files["seen.txt"]
    finally:
        await provider.images.remove(name)


async def test_code_under_test_is_kept_apart_in_a_system_of_its_own(system: Path, tmp_path: Path) -> None:
    task = Task(
        instruction="echo 'echo 5; ls ~/tests' > work.sh",
        verify=('test "$(untrusted bash work.sh)" = 5', "cd /testbed && untrusted cat work.sh >&2"),
        tests={"secret": "x"},
    )
    async with LocalProvider(tmp_path / "state") as provider:
        await imported(provider, "own", system, workdir="/testbed")
        verdict = await judged(provider, task, SandboxSpec(template="own"))
        assert verdict.total == 1, verdict
        await imported(provider, "bare", a_system(tmp_path / "bare"))
        with pytest.raises(SandboxError, match="the image has no python3"):
            await judged(provider, task, SandboxSpec(template="bare"))
        plain = await judged(provider, Task(instruction="true", verify=("true",)), SandboxSpec(template="bare"))
        assert (plain.total, plain.suspicions) == (1, ())


async def test_an_image_without_python_is_refused_before_the_agent_works_for_a_task_that_needs_it(
    play: Play, backends: Registry, tmp_path: Path
) -> None:
    provider = backends.providers["local"]
    assert isinstance(provider, LocalProvider)
    name = f"bare-{secrets.token_hex(4)}"
    await imported(provider, name, a_system(tmp_path / "bare"))
    try:
        task = Task(instruction="touch worked", verify=("untrusted ls worked",))
        refused = await play(task, agent="shell", sandbox=SandboxSpec(template=name))
        assert "the image has no python3" in str(refused.error)
        assert "setup" in refused.timings and "agent" not in refused.timings
        plain = await play(
            task.model_copy(update={"verify": ("ls worked",)}), agent="shell", sandbox=refused.job.sandbox
        )
        assert plain.reward == 1, plain.error
    finally:
        await provider.images.remove(name)


class Templated:
    """A provider whose every box is one of an image."""

    name = "local"

    def __init__(self, inner: LocalProvider, template: str) -> None:
        self._inner, self._template = inner, template

    def check(self, spec: SandboxSpec) -> None:
        self._inner.check(spec)

    def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AbstractAsyncContextManager[LocalBox]:
        return self._inner.open(spec.model_copy(update={"template": self._template}), layers)


@pytest.mark.slow
async def test_a_box_with_a_system_of_its_own_conforms(system: Path, tmp_path: Path) -> None:
    async with LocalProvider(tmp_path / "state") as inner:
        await imported(inner, "own", system)
        verdicts = [verdict async for verdict in check(Templated(inner, "own"))]
    assert [verdict for verdict in verdicts if verdict.outcome == "failed"] == [] and len(verdicts) > 50


async def test_an_image_is_built_on_an_imported_system(system: Path, tmp_path: Path) -> None:
    async with LocalProvider(tmp_path / "state") as provider:
        await imported(provider, "own", system, env={"A": "b"})
        made = await build(provider, "more", PACKAGE, base="own")
        assert made.image.whole and made.image.env["A"] == "b"
        async with provider.open(SandboxSpec(template="more")) as box:
            assert MARK in await said(box, "python3 -c 'import baked' && cat /etc/os-release")


async def test_nothing_of_an_image_is_loaded_outside_the_box(tmp_path: Path) -> None:
    # Bubblewrap is linked with this library and starts before the box is shut; no program of the image needs it.
    folder = a_system(tmp_path / "system")
    told = subprocess.run(["ldd", shutil.which("bwrap") or ""], capture_output=True, text=True).stdout
    for word in told.split():
        if word.startswith("/") and "libcap" in word:
            (folder / word.lstrip("/")).write_bytes(b"not a library")
            break
    else:
        pytest.skip("bwrap is not linked with libcap here")
    async with LocalProvider(tmp_path / "state") as provider:
        await imported(provider, "own", folder)


async def test_a_system_that_cannot_run_a_box_is_refused(tmp_path: Path) -> None:
    folder = a_system(tmp_path / "system")
    (folder / "usr/bin/find").unlink()
    async with LocalProvider(tmp_path / "state") as provider:
        with pytest.raises(UsageError, match="it needs coreutils, find and tar"):
            await imported(provider, "own", folder)
        (folder / "usr/bin/bash").write_text("nonsense")
        with pytest.raises(UsageError, match="it needs bash"):
            await imported(provider, "own", folder)
        (tmp_path / "text").write_text("no archive")
        for path, more in ((tmp_path / "text", {}), (tmp_path / "none", {}), (folder, {"workdir": "/none"})):
            with pytest.raises(UsageError):
                await imported(provider, "own", path, **more)
        assert folders(provider) == set() and provider.images.names() == []


async def test_links_of_an_image_lead_no_mount_out_of_the_box(tmp_path: Path) -> None:
    folder = a_system(tmp_path / "system")
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    shutil.rmtree(folder / "tmp")
    for name in ("home", "tmp", "dev", "proc", "run"):
        (folder / name).symlink_to(outside)
    shutil.move(folder / "etc", folder / "real-etc")
    (folder / "etc").symlink_to(outside)
    async with LocalProvider(tmp_path / "state") as provider:
        await imported(provider, "own", folder)
        async with provider.open(SandboxSpec(template="own")) as box:
            assert (
                await said(box, "echo x > ~/x; echo x > /tmp/x; ls /home /tmp; ls -A /run")
                == "/home:\nuser\n\n/tmp:\nx\n"
            )
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2", "zst"])
async def test_half_an_archive_is_no_image(tmp_path: Path, kind: str) -> None:
    path = tarred(a_system(tmp_path / "system"), tmp_path / "x.tar", "w" if kind == "zst" else f"w:{kind}")
    if kind == "zst":
        if not shutil.which("zstd"):
            pytest.skip("no zstd here")
        subprocess.run(["zstd", "-q", "-1", path], check=True)
        path = tmp_path / "x.tar.zst"
    os.truncate(path, path.stat().st_size // 2)
    async with LocalProvider(tmp_path / "state") as provider:
        with pytest.raises(UsageError, match=r"no usable tar archive|to its end"):
            await imported(provider, "own", path)
        assert folders(provider) == set()


@pytest.mark.parametrize("kind", ["home", "system"])
async def test_an_archive_whose_links_lead_up_cannot_put_the_host_into_its_boxes(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "host"
    secret.mkdir()
    (secret / "secret").write_text("the host's")
    archive = tarred(a_system(tmp_path / "system"), tmp_path / "evil.tar")
    with tarfile.open(archive, "a") as tar:
        for name, target in (("up", ".."), (f"up/{kind}", str(secret))):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    async with LocalProvider(tmp_path / "state") as provider:
        await imported(provider, "evil", archive)
        [part] = [path for path in provider.layers.folder.iterdir() if path.name.startswith("image_")]
        assert [path.name for path in part.iterdir() if path.is_symlink()] == []
        # Should an older import have left one, it is not followed.
        if kind == "home":
            (part / "home").symlink_to(secret)
        async with provider.open(SandboxSpec(template="evil")) as box:
            assert "secret" not in await said(box, "ls -a ~")


async def test_a_small_archive_that_unpacks_to_more_than_allowed_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = a_system(tmp_path / "system")
    (folder / "opt/bomb").touch()
    os.truncate(folder / "opt/bomb", 3 << 30)
    archive = tmp_path / "x.tar"
    subprocess.run(["tar", "--create", "--sparse", "--file", archive, "--directory", folder, "."], check=True)
    assert archive.stat().st_size < 100 << 20
    async with LocalProvider(tmp_path / "state") as provider:
        with pytest.raises(UsageError, match=r"cannot take 'opt/bomb': .* more than 0.5 GB; raise --max-gb"):
            await imported(provider, "own", archive, max_gb=0.5)
        assert folders(provider) == set()
    told = rollcage(tmp_path, "image", "import", "own", str(archive), "--max-gb", "0.5")
    assert told.returncode == 2 and "raise --max-gb" in told.stderr
