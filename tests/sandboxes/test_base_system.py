"""The base system: the same programs in every box, whatever the machine has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rollcage.errors import SetupError, UsageError
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.images import ImageStore
from rollcage.sandboxes.images.base import COMMANDS, PACKAGES, ensure_base
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.settings import Settings
from rollcage.types import BASE, SandboxSpec, ScriptedCall, ScriptedTurn, Task
from rollcage.wiring import system_of
from support.base_system import base_there, home_with_base
from support.commands import rollcage
from support.environment_server import served, shell
from support.ordinary import ordinary_user

USED = """
set -e
for name in $COMMANDS; do command -v "$name" > /dev/null || { echo "no $name"; exit 1; }; done
test "$(readlink -f "$(command -v python)")" = "$(readlink -f "$(command -v python3)")"
python -m venv venv && venv/bin/python -c 'print("venv")'
printf 'def test_one(): assert 1 + 1 == 2\n' > test_one.py && pytest -q test_one.py
printf '#include <cstdio>\nint main() { puts("compiled"); }\n' > a.cc && g++ -o a a.cc && ./a
printf 'all:\n\t@echo made\n' > Makefile && make
git init -q . && git add -A && git -c user.name=a -c user.email=a@b.c commit -qm one && git log --oneline | wc -l
node -e 'console.log([1, 2].length)' && npm --version > /dev/null && echo x | awk '{ print "awk" }'
pip --version > /dev/null && curl --version > /dev/null && rg -q compiled a.cc && echo all
"""
"""Every program does something: one that is there and lacks a library would be no use."""


@pytest.fixture(scope="module")
def base(state_dir: Path) -> Path:
    base_there(state_dir)
    return state_dir


async def test_every_program_that_tasks_call_is_there_and_works(base: Path) -> None:
    async with LocalProvider(base) as provider, provider.open(SandboxSpec(system="base")) as box:
        ran = await sh(box, USED, env={"COMMANDS": " ".join(COMMANDS)}, timeout_s=300)
        assert ran.code == 0, ran
        assert ran.stdout.text.splitlines()[-6:] == ["compiled", "made", "1", "2", "awk", "all"]
        # Compiled once: were it not, every box would compile all of it again.
        kept = await sh(box, "python -v -c 'import json, pytest' 2>&1 | grep -c 'matches.*/_pytest/'")
        assert int(kept.stdout.text) > 20


async def test_pip_installs_below_home_although_the_system_is_a_distribution_s(base: Path) -> None:
    async with LocalProvider(base) as provider, provider.open(SandboxSpec(system="base")) as box:
        made = (
            'mkdir -p p && printf \'[project]\nname = "mine"\nversion = "1"\n\' > p/pyproject.toml && touch p/mine.py'
        )
        build = "pip install -q --no-index --no-build-isolation --no-deps ./p"
        ran = await sh(
            box, f"{made} && {build} && cd / && python -c 'import mine; print(mine.__file__)'", timeout_s=300
        )
        assert ran.stdout.text.startswith("/home/user/.local/lib/python3"), ran


async def test_a_box_of_it_shows_nothing_of_the_machine_s_system(base: Path) -> None:
    async with LocalProvider(base) as provider, provider.open(SandboxSpec(system="base")) as box:
        assert (await sh(box, "ls -A /usr/local/bin /opt /srv /mnt | grep -v :")).stdout.text.split() == []
        assert (await sh(box, "echo x > /usr/bin/x || echo x > /etc/x")).code != 0


async def test_the_same_packages_are_not_unpacked_again(base: Path) -> None:
    said: list[str] = []
    async with LocalProvider(base) as provider:
        before = provider.images.get(BASE)
        try:
            again = await ensure_base(provider, said.append)
        except SetupError as error:
            pytest.skip(f"Debian's packages cannot be had here: {error}")
        assert again.new == any(line.startswith("fetching") for line in said) == (again.image.recipe != before.recipe)


@pytest.mark.slow
def test_an_ordinary_user_makes_it_with_the_same_files_as_root(base: Path) -> None:
    """In a state folder of its own, with no right to anything of the machine's."""
    make = (
        "import anyio, sys\nfrom pathlib import Path\n"
        "from rollcage.sandboxes.images.base import ensure_base\n"
        "from rollcage.sandboxes.local.provider import LocalProvider\n"
        "async def main():\n"
        "    async with LocalProvider(Path(sys.argv[1])) as provider:\n"
        "        print((await ensure_base(provider, lambda line: None)).image.recipe)\n"
        "anyio.run(main)\n"
    )
    with ordinary_user("rollcage.sandboxes.images.base") as (python, env, home):
        made = subprocess.run(
            [*python, "-c", make, f"{home}/state"], env=env, capture_output=True, text=True, timeout=900
        )
        assert made.returncode == 0, made.stderr
        theirs, ours = LocalProvider(home / "state").images, LocalProvider(base).images
        same = made.stdout.strip() == theirs.get(BASE).recipe == ours.get(BASE).recipe
        assert same, "rollcage setup --base brings it up to date"
        assert _files(theirs) == _files(ours)


def _files(images: ImageStore) -> dict[str, tuple[int, int]]:
    folder = images.layers.folder / images.get(BASE).parts[-1]
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path.relative_to(folder)): (seen.st_mode, seen.st_size) for path, seen in found.items()}


def test_it_is_the_usual_system_once_it_is_there_and_a_variable_decides(base: Path, tmp_path: Path) -> None:
    home = home_with_base(base, tmp_path / "with")
    for folder, variables, system in (
        (home, {}, "base"),
        (home, {"ROLLCAGE_SYSTEM": "host"}, "host"),
        (tmp_path / "without", {}, "host"),
        (tmp_path / "without", {"ROLLCAGE_SYSTEM": "base"}, "base"),
    ):
        settings = Settings.from_environ({**variables, "ROLLCAGE_HOME": str(folder)})
        assert system_of(settings, LocalProvider(folder).images) == system
    with pytest.raises(UsageError, match="host or to base"):
        Settings.from_environ({"ROLLCAGE_SYSTEM": "windows", "ROLLCAGE_HOME": str(tmp_path)})


WRITE = "printf 'print(\"hello\")\\n' > hello.py; printf 'def greet(name): return f\"Hi {name}\"\\n' > greeting.py"
VERIFY = ["python hello.py | grep -qx hello", "python -c \"import greeting; assert greeting.greet('x') == 'Hi x'\""]


def test_the_published_example_s_task_earns_all_of_its_reward(base: Path, tmp_path: Path) -> None:
    """Whatever the machine has: `python` is a name of the base system's. On the host's, the machine decides."""
    import httpx

    home = home_with_base(base, tmp_path / "home")
    with served(home) as url:
        arguments = shell(WRITE, verify=VERIFY)
        for more, system in (({}, "base"), ({"system": "base"}, "base"), ({"system": "host"}, "host")):
            call = {"name": "run_rollout", "arguments": {**arguments, **more}}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
            accept = {"Accept": "application/json, text/event-stream"}
            answer = httpx.post(f"{url}/mcp", json=body, headers=accept, timeout=120).json()
            result = answer["result"]["structuredContent"]
            wanted = 1.0 if system == "base" or shutil.which("python", path="/usr/local/bin:/usr/bin:/bin") else 0.0
            assert (result["error"], result["reward"]) == (None, wanted), result["verify_results"]


def test_opencode_works_in_it_and_the_log_says_so(base: Path, tmp_path: Path) -> None:
    import rollcage as face

    call = ScriptedCall(name="bash", arguments={"command": WRITE, "description": "Writes both"})
    task = Task(instruction="Write both.", solution=(ScriptedTurn(tool_calls=(call,)), ScriptedTurn(text="Done.")))
    settings = Settings.from_environ({"ROLLCAGE_HOME": str(home_with_base(base, tmp_path / "home"))})
    rollout = face.run(task, settings=settings, verify=VERIFY)
    assert (rollout.reward, rollout.job.sandbox.system) == (1.0, "base"), rollout.error


def test_doctor_names_the_system_and_what_it_lacks(base: Path, tmp_path: Path) -> None:
    import json

    home_with_base(base, tmp_path / "state")
    for variables, system in (({}, "base"), ({"ROLLCAGE_SYSTEM": "host"}, "host")):
        found = json.loads(rollcage(tmp_path, "doctor", "--json", env=variables).stdout)["findings"]
        finding = next(finding for finding in found if finding["name"] == "system")
        lacking = [
            name
            for name in COMMANDS
            if system == "host" and not shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
        ]
        assert finding["detail"].startswith(f"{system} (") and finding["ok"] == (not lacking)
        assert all(name in finding["detail"].partition("lacks ")[2].split(", ") for name in lacking)
        assert ("setup --base" in finding["remedy"]) == bool(lacking)


def test_an_image_and_a_system_are_not_named_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="system: the image 'x' has a system of its own"):
        LocalProvider(tmp_path).check(SandboxSpec(system="base", template="x"))


def test_templates_at_e2b_get_the_same_packages() -> None:
    from rollcage.sandboxes.e2b.template import TemplateRecipe

    assert tuple(TemplateRecipe().packages) == PACKAGES


def test_boxes_of_the_published_harness_show_it_too(base: Path) -> None:
    from opencode_env.sandbox.boxes import LocalSandboxBackend

    for spec, system in ((None, "base"), (SandboxSpec(system="host"), "host")):
        backend = LocalSandboxBackend(spec=spec, state_dir=base)
        assert backend.spec.system == system
        handle = backend.create(timeout_s=60)
        try:
            found = handle.exec("command -v python pytest")
            assert system == "host" or found.exit_code == 0, found
        finally:
            handle.kill()
