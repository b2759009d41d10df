"""Images: what was prepared once is there in every box, whole, and is made and removed safely."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.results.result import RolloutResult
from rollcage.runner import Registry
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, SandboxSpec, ScriptedCall, ScriptedTurn, Task
from support.commands import rest, rollcage, rollcage_running
from support.image_making import build, folders, said
from support.playing import Play
from support.systems import PYTHON

PACKAGE = "mkdir -p $(python3 -m site --user-site) && echo 'WORD = 42' > $(python3 -m site --user-site)/baked.py"
PROGRAM = (
    "mkdir -p ~/.local/bin && printf '#!/bin/sh\\necho baked\\n' > ~/.local/bin/judge && chmod +x ~/.local/bin/judge"
)
ONE_OF_A_KIND = "head -c 16 /dev/urandom > ~/token"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A web server on an address that boxes reach only through the proxy; gives `http://address:port`."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.2", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.2:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_package_in_an_image_is_there_for_agent_and_verifier_without_a_network(
    play: Play, backends: Registry
) -> None:
    provider = backends.providers["local"]
    assert isinstance(provider, LocalProvider)
    name = f"test-{secrets.token_hex(4)}"
    await build(provider, name, PACKAGE, PROGRAM)
    try:
        command = "python3 -c 'import baked; print(baked.WORD)' > word.txt && judge >> word.txt"
        calls = (ScriptedCall(name="bash", arguments={"command": command, "description": "look"}),)
        task = Task(
            instruction="Use the package.",
            verify=(
                "python3 -c 'import baked; assert baked.WORD == 42'",
                '[ "$(judge)" = baked ]',
                "grep baked word.txt",
            ),
            solution=(ScriptedTurn(tool_calls=calls), ScriptedTurn(text="done")),
        )
        rollout = await play(task, sandbox=SandboxSpec(template=name))
        assert rollout.outcome == "finished" and rollout.reward == 1.0, rollout
        assert rollout.files["word.txt"] == "42\nbaked\n"
    finally:
        await provider.images.remove(name)


def test_the_command_builds_lists_uses_and_removes_an_image(tmp_path: Path) -> None:
    task = tmp_path / "task.toml"
    task.write_text(
        'instruction = "judge > out.txt"\nverify = ["judge"]\n[sandbox]\ntemplate = "tools"\n[agent]\nname = "shell"\n'
    )
    unknown = rollcage(tmp_path, "run", "task.toml", "--endpoint", "scripted")
    assert unknown.returncode == 2 and "template: there is no image 'tools'" in unknown.stderr
    made = rollcage(tmp_path, "image", "build", "tools", "--setup", PROGRAM, "--json")
    image = json.loads(made.stdout)
    assert made.returncode == 0 and image["new"] and image["env"]["PATH"].startswith(f"{HOME}/.local/bin:")
    assert not json.loads(rollcage(tmp_path, "image", "build", "tools", "--setup", PROGRAM, "--json").stdout)["new"]
    ran = rollcage(tmp_path, "run", "task.toml", "--endpoint", "scripted", "--json")
    result = RolloutResult.model_validate_json(ran.stdout)
    assert result.reward == 1.0 and result.files == {f"{HOME}/workdir/out.txt": "baked\n"}, ran.stderr
    [row] = json.loads(rollcage(tmp_path, "image", "ls", "--json").stdout)
    assert row["name"] == "tools" and row["bytes"] > 0 and ".local/bin/judge" in row["source"]
    assert "tools" in rollcage(tmp_path, "image", "ls").stdout
    assert "its own" not in rollcage(tmp_path, "image", "show", "tools").stdout
    assert rollcage(tmp_path, "image", "rm", "tools").returncode == 0
    assert rollcage(tmp_path, "image", "ls", "--json").stdout == "[]\n"
    failed = rollcage(tmp_path, "image", "build", "tools", "--setup", "echo because >&2; exit 3")
    assert failed.returncode == 3 and "exit code 3: because" in failed.stderr
    assert "known: none yet" in rollcage(tmp_path, "image", "show", "tools").stderr
    assert [path for path in (tmp_path / "state/layers").iterdir() if path.is_dir()] == []


def test_a_task_file_brings_files_and_commands_into_an_image(tmp_path: Path) -> None:
    task = tmp_path / "task.toml"
    task.write_text('instruction = "x"\nsetup = ["wc -c < seed.txt > size.txt"]\n[files]\n"seed.txt" = "12345"\n')
    made = rollcage(tmp_path, "image", "build", "seeded", "--file", "task.toml", "--env", "COLOUR=green")
    assert made.returncode == 0, made.stderr
    arguments = ["run", "-i", "echo $COLOUR; cat seed.txt size.txt", "--agent", "shell", "--endpoint", "scripted"]
    ran = rollcage(tmp_path, *arguments, "--template", "seeded", "--json")
    assert RolloutResult.model_validate_json(ran.stdout).files == {
        f"{HOME}/workdir/seed.txt": "12345",
        f"{HOME}/workdir/size.txt": "5\n",
    }


async def test_what_an_agent_puts_over_a_program_of_the_image_does_not_judge_it(play: Play, backends: Registry) -> None:
    provider = backends.providers["local"]
    assert isinstance(provider, LocalProvider)
    name = f"test-{secrets.token_hex(4)}"
    await build(provider, name, PROGRAM.replace("echo baked", "exit 1"))
    plant = "printf '#!/bin/sh\\nexit 0\\n' > ~/.local/bin/$name; chmod +x ~/.local/bin/$name"
    cheat = f"for name in judge find tar bash; do {plant}; done"
    try:
        for where in ("box", "fresh"):
            task = Task(instruction=cheat, verify=("judge",), verify_in=where)
            rollout = await play(task, agent="shell", sandbox=SandboxSpec(template=name))
            assert rollout.reward == 0.0, (where, rollout)
    finally:
        await provider.images.remove(name)


async def test_the_same_recipe_is_not_built_again_unless_asked(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider:
        first = await build(provider, "one", ONE_OF_A_KIND)
        again = await build(provider, "one", ONE_OF_A_KIND, hosts=("example.com",))
        other = await build(provider, "two", ONE_OF_A_KIND)
        await build(provider, "coloured", env={"COLOUR": "green"})
        green = await build(provider, "green", "test $COLOUR = green", ONE_OF_A_KIND, base="coloured")
        assert green.image.env == {"COLOUR": "green"} and green.image.parts != first.image.parts
        assert first.new and not again.new and again.image == first.image
        assert other.image.parts == first.image.parts
        rebuilt = await build(provider, "one", ONE_OF_A_KIND, rebuild=True)
        assert rebuilt.new and rebuilt.image.parts != first.image.parts
        assert not (await build(provider, "one", ONE_OF_A_KIND)).new
        await build(provider, "two", "true")
        assert first.image.parts[0] not in folders(provider), "what nobody names any more is gone"
        assert rebuilt.image.parts[0] in folders(provider)


async def test_two_who_build_the_same_at_once_build_it_once(tmp_path: Path) -> None:
    parts = []

    async def one(name: str) -> None:
        async with LocalProvider(tmp_path) as provider:
            parts.append((await build(provider, name, f"{ONE_OF_A_KIND}; sleep 0.3")).image.parts)

    async with anyio.create_task_group() as tasks:
        for name in ("same", "same", "other"):
            tasks.start_soon(one, name)
    assert len(parts) == 3 and len(set(parts)) == 1


async def test_an_image_goes_on_from_another_and_what_it_deletes_is_gone(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider:
        await build(
            provider, "base", "mkdir -p a/b && echo 1 > a/b/old && echo 1 > gone && echo 1 > kept && ln kept twin"
        )
        # A folder that was replaced, and rights that would keep an ordinary user from reading it.
        change = "rm gone && rm -r a && mkdir -p a/b && echo 2 > a/b/new && chmod 0 a/b/new && chmod 0 a/b"
        made = await build(provider, "next", change, base="base")
        assert len(made.image.parts) == 2
        async with provider.open(SandboxSpec(template="next")) as box:
            assert (await said(box, "ls; cat a/b/new; ls a/b")).split() == ["a", "kept", "twin", "2", "new"]
        await provider.images.remove("base")
        async with provider.open(SandboxSpec(template="next")) as box:
            assert await said(box, "cat kept") == "1\n"
        await provider.images.remove("next")
        assert folders(provider) == set()


async def test_a_build_that_fails_or_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider:
        with pytest.raises(SandboxError, match="exit code 7: sorry"):
            await build(provider, "bad", "echo 1 > x; echo sorry >&2; exit 7")
        with anyio.move_on_after(0.5) as scope:
            await build(provider, "slow", "echo 1 > x; sleep 100")
        assert scope.cancelled_caught
        with pytest.raises(SandboxError, match="not built after"):
            await build(provider, "slow", "sleep 100", timeout_s=0.3)
        for nothing in ({}, {"base": "missing"}, {"setup": ("true",), "packages": ("a;b",)}):
            with pytest.raises(UsageError):
                await build(provider, "bad", **nothing)
        with pytest.raises(UsageError, match="image name"):
            await build(provider, "../bad", "true")
        assert folders(provider) == set() and provider.images.names() == []


async def test_what_a_killed_build_left_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    async with rollcage_running(tmp_path, "image", "build", "one", "--setup", "echo 1 > x; sleep 100") as process:
        assert process.stderr
        assert b"$ echo" in await process.stderr.receive()
        process.send_signal(signal.SIGKILL)
        await process.wait()
    layers = tmp_path / "state/layers"
    assert [path.name for path in layers.iterdir() if path.is_dir()] != []
    assert rollcage(tmp_path, "image", "build", "two", "--setup", "true").returncode == 0
    [left] = [path.name for path in layers.iterdir() if path.is_dir()]
    assert not left.endswith(".draft")


async def test_ctrl_c_ends_a_build_and_leaves_nothing(tmp_path: Path) -> None:
    async with rollcage_running(tmp_path, "image", "build", "one", "--setup", "sleep 100") as process:
        assert process.stderr
        assert b"$ sleep" in await process.stderr.receive()
        process.send_signal(signal.SIGINT)
        code, _, _ = await rest(process)
    assert code == 130
    assert [path for path in (tmp_path / "state/layers").iterdir() if path.is_dir()] == []


async def test_an_image_is_not_removed_under_an_open_box(tmp_path: Path) -> None:
    home = tmp_path / "state"
    async with LocalProvider(home) as provider:
        await build(provider, "one", PROGRAM)
        async with provider.open(SandboxSpec(template="one")) as box:
            refused = rollcage(tmp_path, "image", "rm", "one")
            assert refused.returncode == 2 and "in use by an open box" in refused.stderr
            await build(provider, "one", "echo anew > word")
            assert await said(box, "judge") == "baked\n", "made anew, the old one stays for those who have it"
            async with provider.open(SandboxSpec(template="one")) as other:
                assert await said(other, "cat word") == "anew\n"
        assert rollcage(tmp_path, "image", "rm", "one").returncode == 0
        assert folders(provider) == set() and rollcage(tmp_path, "image", "ls", "--json").stdout == "[]\n"
        with pytest.raises(UsageError, match="no image"):
            provider.check(SandboxSpec(template="one"))


async def test_a_spoilt_record_is_told_and_can_be_replaced_or_removed(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider:
        made = await build(provider, "one", PROGRAM)
        (provider.images.folder / "one.json").write_text("{")
        with pytest.raises(SetupError, match=r"image 'one': .* cannot be read; make it again"):
            provider.check(SandboxSpec(template="one"))
        await build(provider, "two", "true")
        assert made.image.parts[0] in folders(provider), "nobody knows what the record named"
        assert (await build(provider, "one", PROGRAM)).image.parts == made.image.parts
        (provider.images.folder / "one.json").write_text("{")
        await provider.images.remove("one")
        shutil.rmtree(provider.layers.folder / provider.images.get("two").parts[0])
        with pytest.raises(SetupError, match="its files are gone"):
            async with provider.open(SandboxSpec(template="two")):
                pass


async def test_a_build_reaches_the_hosts_it_was_allowed_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web/word").write_text("from outside")
    with served(tmp_path / "web") as address:
        fetch = (
            f"python3 -c \"import urllib.request as u; open('word', 'wb').write(u.urlopen('{address}/word').read())\""
        )
        async with LocalProvider(tmp_path / "state") as provider:
            with pytest.raises(SandboxError, match="exit code 1"):
                await build(provider, "one", fetch)
            with pytest.raises(SandboxError, match="403"):
                await build(provider, "one", fetch, hosts=("127.0.0.3",))
            await build(provider, "one", fetch, hosts=("127.0.0.2",))
            async with provider.open(SandboxSpec(template="one")) as box:
                assert await said(box, "cat word; env | grep -ci proxy || true") == "from outside0\n"


def _has_pip() -> bool:
    return subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _has_pip(), reason="the system's Python has no pip")
async def test_pip_installs_into_an_image_without_being_told_where(tmp_path: Path) -> None:
    import zipfile

    (tmp_path / "web").mkdir()
    with zipfile.ZipFile(tmp_path / "web/greeting-1.0-py3-none-any.whl", "w") as wheel:
        info = "greeting-1.0.dist-info"
        wheel.writestr("greeting.py", "def main():\n    print('hello')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\ngreet = greeting:main\n")
        wheel.writestr(f"{info}/RECORD", "")
    with served(tmp_path / "web") as address:
        install = f"python3 -m pip install --quiet --no-deps {address}/greeting-1.0-py3-none-any.whl"
        async with LocalProvider(tmp_path / "state") as provider:
            await build(provider, "one", install, hosts=("127.0.0.2",))
            async with provider.open(SandboxSpec(template="one")) as box:
                assert await said(box, "greet; python3 -c 'import greeting; greeting.main()'") == "hello\nhello\n"


@pytest.mark.skipif(not (shutil.which("apt-get") and shutil.which("dpkg-deb")), reason="no apt here")
async def test_a_debian_package_is_unpacked_over_the_system_with_what_it_depends_on(tmp_path: Path) -> None:
    web = tmp_path / "web"
    _a_deb(
        web, "rollcage-greet", {"usr/bin/greet": "#!/bin/sh\ncat /lib/greet/word /etc/greet.conf\n"}, "rollcage-word"
    )
    _a_deb(web, "rollcage-word", {"lib/greet/word": "hello\n", "etc/greet.conf": "settings\n", "opt/greet/x": "x"}, "")
    with served(web) as address:
        source = f"deb [trusted=yes] {address} ./"
        async with LocalProvider(tmp_path / "state") as provider:
            more: dict[str, Any] = {"packages": ("rollcage-greet",), "sources": (source,), "hosts": ("127.0.0.2",)}
            made = await build(provider, "one", "greet > ~/word", **more)
            assert len(made.image.parts) == 2 and not made.image.whole
            async with provider.open(SandboxSpec(template="one")) as box:
                assert (
                    await said(box, "cat word; greet; cat /opt/greet/x; ls -A") == "hello\nsettings\n" * 2 + "xword\n"
                )
                assert await said(box, "python3 -c 'print(1)'") == "1\n"
                assert (await sh(box, "echo 1 > /usr/bin/greet")).code != 0
            with pytest.raises(SandboxError, match="Unable to locate package rollcage-nothing"):
                await build(provider, "two", **{**more, "packages": ("rollcage-nothing",)})


def _a_deb(web: Path, name: str, files: dict[str, str], depends: str) -> None:
    tree = web / "trees" / name
    for path, text in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(0o755)
    control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.com>\nDescription: x\n"
    control += f"Depends: {depends}\n" if depends else ""
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(control)
    deb = web / f"{name}.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, deb], check=True, capture_output=True)
    data = deb.read_bytes()
    with (web / "Packages").open("a") as listing:
        digest = hashlib.sha256(data).hexdigest()
        listing.write(f"{control}Filename: ./{deb.name}\nSize: {len(data)}\nSHA256: {digest}\n\n")
