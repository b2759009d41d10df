"""The machine is told apart from what it lacks; the same box works for root and for an ordinary user, on both loops."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EINVAL, ENODEV, ENOSPC, ENOSYS, EOPNOTSUPP, EPERM
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

from rollcage.errors import SetupError
from rollcage.sandboxes.base import run, sh
from rollcage.sandboxes.local import cgroups
from rollcage.sandboxes.local.machine import findings, remedy
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec
from support.boxes import ROOT, a_box, python
from support.commands import environ
from support.paths import TESTS

ANYBODY = 65533
NEEDED = "anyio pydantic pydantic_core annotated_types typing_inspection typing_extensions idna sniffio uvloop".split()
TESTING = "pytest _pytest py pluggy iniconfig packaging pygments anyio".split()
FILES = {
    "own tests": ["test_sandbox_core.py", "test_sandbox_hostile.py", "test_sandbox_rewind.py", "test_layers.py"],
    "conformance": ["../conformance/test_box_suite.py"],
    "judge and judged": ["test_sandbox_separate.py", "../rollout/test_judge.py", "../rollout/test_judge_cheats.py"],
    "plain verifiers": ["../rollout/test_guards.py", "../rollout/test_plain_cheats.py"],
}
SUPPORT = "__init__ boxes judging judge_cheats ordinary paths plain_boxes plain_cheats".split()
BACKEND = "import pytest\n@pytest.fixture(scope='session')\ndef anyio_backend():\n    return 'asyncio'\n"


def test_the_findings_name_everything_and_a_remedy_for_what_is_not_there() -> None:
    found = {finding.name: finding for finding in findings()}
    assert set(found) == {
        *("bwrap", "rg", "nsenter", "setpriv", "user namespaces", "overlay in a user namespace", "seccomp"),
        *("cgroup memory", "cgroup pids", "cgroup cpu", "inotify", "disk limit", "judge and judged"),
    }
    for name in ("bwrap", "user namespaces", "overlay in a user namespace", "seccomp", "judge and judged"):
        assert found[name].ok, found[name]
    assert all(bool(finding.remedy) != finding.ok for finding in found.values())
    assert "bubblewrap" in found["bwrap"].detail


def test_each_refusal_has_its_remedy() -> None:
    assert "6.6" in remedy("attributes", EPERM)
    assert "ext4" in remedy("attributes", EOPNOTSUPP)
    assert "ext4" in remedy("overlay", EINVAL)
    assert "5.15" in remedy("", ENOSYS)
    assert "sysctl" in remedy("", ENOSPC)
    assert "modprobe overlay" in remedy("overlay", ENODEV)
    assert "layer" in remedy("layer", EACCES)
    assert "--security-opt" in remedy("", EPERM)


@contextmanager
def _path(folder: str) -> Iterator[None]:
    before, os.environ["PATH"] = os.environ["PATH"], folder
    try:
        yield
    finally:
        os.environ["PATH"] = before


async def test_without_bubblewrap_nothing_runs_and_the_remedy_is_told(tmp_path: Path) -> None:
    with _path(str(tmp_path)), pytest.raises(SetupError, match="apt-get install bubblewrap"):
        async with a_box(tmp_path / "state"):
            pass


async def test_a_bubblewrap_that_cannot_isolate_is_found_out_before_anything_relies_on_it(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    shutil.copy("/usr/bin/false", broken)
    with _path(str(tmp_path)), pytest.raises(SetupError, match="no command can be isolated here"):
        async with a_box(tmp_path / "state"):
            pass


async def test_every_command_runs_in_namespaces_that_are_not_ours(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        here = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "mnt", "net", "pid", "ipc", "uts")}
        look = f"import os;print({{k: os.readlink(f'/proc/self/ns/{{k}}') for k in {list(here)}}})"
        first, second = [eval((await python(box, look)).stdout.text) for _ in range(2)]
        assert all(first[kind] != here[kind] for kind in here)
        assert first["net"] == second["net"]
        assert first["pid"] != here["pid"]


def test_the_cgroup_trees_are_read_as_the_kernel_writes_them() -> None:
    hybrid = (
        "30 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "33 24 0:29 / / rw - ext4 /dev/vda rw\n"
    )
    member = "4:memory:/some/where\n3:cpu,cpuacct:/\n0::/user.slice/a\n"
    assert [(version, names, str(own)) for version, names, _, own in cgroups.places(hybrid, member)] == [
        (1, ("memory",), "/sys/fs/cgroup/memory/some/where"),
        (1, ("cpu",), "/sys/fs/cgroup/cpu,cpuacct"),
        (2, ("memory", "pids", "cpu"), "/sys/fs/cgroup/unified/user.slice/a"),
    ]
    inside = "32 24 0:28 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup2 ro\n"
    assert [str(own) for *_, own in cgroups.places(inside, "0::/docker/x\n")] == ["/sys/fs/cgroup"]


def test_the_limits_are_written_in_each_versions_own_words() -> None:
    spec = SandboxSpec(memory_mb=100, pids=50, cpus=0.5)
    assert cgroups.settings_of(2, ("memory", "pids", "cpu"), spec) == {
        "memory.max": str(100 << 20),
        "memory.swap.max": "0",
        "pids.max": "82",
        "cpu.max": "50000 100000",
    }
    assert cgroups.settings_of(1, ("cpu",), spec) == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
    assert cgroups.settings_of(2, ("cpu",), SandboxSpec(cpus=0.001)) == {"cpu.max": "1000 100000"}


UNIFIED = next(
    (p for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if (p / "cgroup.procs").exists()), None
)
IN_A_GROUP = """
import json, os, sys, time
from pathlib import Path
from rollcage.sandboxes.local.cgroups import Cgroups
from rollcage.types import SandboxSpec
def group(pid): return next(l[3:] for l in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if l.startswith("0::"))
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
os.setgroups([]); os.setresgid(65533, 65533, 65533); os.setresuid(65533, 65533, 65533)
beside = os.fork() if sys.argv[3] == "two" else -1
if beside == 0: time.sleep(1000)
groups = Cgroups((sys.argv[2],))
told = {"trees": [(tree.version, tree.controllers, str(tree.folder)) for tree in groups.trees()], "self": group("self")}
if groups.trees():
    box = groups.open("box", SandboxSpec())
    child = os.fork()
    if child == 0:
        os.write(box.joins[0], b"0")
        print(group("self"), flush=True)
        os.execvp("sleep", ["sleep", "1000"])
    while not group(child).endswith("/box"): pass
    box.close()
    told["ended"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    again = Cgroups((sys.argv[2],))
    told["again"] = str(again.trees()[0].folder.parent)
    again.close()
groups.close()
if beside > 0: os.kill(beside, 9)
print(json.dumps(told))
"""


@contextmanager
def _handed_over(name: str, controller: str) -> Iterator[Path]:
    """A group that an ordinary user may arrange as they like, as systemd's `Delegate=yes` makes it."""
    assert UNIFIED is not None
    control = UNIFIED / "cgroup.subtree_control"
    was_there = controller in control.read_text().split()
    control.write_text(f"+{controller}")
    folder = UNIFIED / name
    folder.mkdir()
    try:
        for file in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(folder / file, ANYBODY, ANYBODY)
        yield folder
    finally:
        (folder / "cgroup.kill").write_text("1")
        cgroups._remove(folder)
        if not was_there:
            control.write_text(f"-{controller}")


@pytest.mark.skipif(not ROOT, reason="only root can hand a cgroup over")
@pytest.mark.parametrize("case", ["alone", "two", "two and handed over by systemd"])
def test_in_a_version_2_group_of_ours_we_move_to_a_leaf_and_limit_boxes_beside_it(case: str) -> None:
    # The hugetlb controller stands in for memory: it too may be passed on only by a group without processes.
    offered = (UNIFIED / "cgroup.controllers").read_text().split() if UNIFIED else []
    controller = next((name for name in ("hugetlb", "memory") if name in offered), None)
    if controller is None:
        pytest.skip("no version 2 controller here")
    with _handed_over(f"test-{os.getpid()}", controller) as folder:
        if case.endswith("systemd"):
            os.setxattr(folder, "user.delegate", b"1")
        arguments = [str(folder), controller, case.split()[0]]
        command = [sys.executable, "-c", IN_A_GROUP, *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        # The child that is killed writes to the same pipe, and may not have come to the end of its line.
        told = json.loads(ran.stdout[ran.stdout.index('{"trees"') :])
        if case == "two":
            # Somebody else is in the group, and nobody said that they may be moved.
            assert told == {"trees": [], "self": f"/{folder.name}"}
            return
        [(version, controllers, place)] = told["trees"]
        assert (version, controllers, Path(place).parent) == (2, [controller], folder)
        assert told["self"] == f"/{folder.name}/{Path(place).name}-self"
        # `cgroup.kill` ended what was still in the box's group, and a second provider starts from the same place.
        assert (told["ended"], told["again"]) == (-9, str(folder))
        assert [path.name for path in folder.glob("rollcage-*")] == [Path(told["self"]).name]


BARRED = """
import ctypes, os, sys
kind, *command = sys.argv[1:]
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    os.write(ready[1], b"x"), os.read(go[0], 1)
    os.setresgid(0, 0, 0), os.setresuid(0, 0, 0)
    with open(f"/proc/sys/user/{kind}", "w") as file: file.write("0")
    os.execv(command[0], command)
os.read(ready[0], 1)
for ids in ("uid_map", "gid_map"):
    with open(f"/proc/{child}/{ids}", "w") as file: file.write("0 0 1\\n61234 61234 1\\n")
os.write(go[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Runs a command where no namespace of a kind can be made: in a user namespace whose own allowance is none."""


def _barred(kind: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARRED, kind, sys.executable, "-m", "rollcage", *arguments]
    return subprocess.run(command, env=environ(home), cwd=home, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not ROOT, reason="only root can make the condition")
@pytest.mark.parametrize("kind", ["max_user_namespaces", pytest.param("max_net_namespaces", marks=pytest.mark.slow)])
def test_where_namespaces_are_barred_nothing_runs_and_the_remedy_is_told(tmp_path: Path, kind: str) -> None:
    doctor = _barred(kind, tmp_path, "doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert doctor.returncode == 3
    assert not found["user namespaces"]["ok"] and "nothing will be run" in found["user namespaces"]["detail"]
    assert found["user namespaces"]["remedy"] == f"run: sudo sysctl -w user.{kind}=65536"
    task = ["--agent", "shell", "--instruction", "touch ran", "--setup", f"touch {tmp_path}/ran", "-e", "scripted"]
    ran = _barred(kind, tmp_path, "run", *task, "--json")
    assert ran.returncode == 3, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    assert told["outcome"] == "sandbox_failed" and told["reward"] is None
    assert f"sudo sysctl -w user.{kind}=65536" in told["error"]
    assert not (tmp_path / "ran").exists()


def test_it_works_on_uvloop_too(tmp_path: Path) -> None:
    async def use() -> None:
        async with LocalProvider(tmp_path) as provider, provider.open(SandboxSpec()) as box:
            ran = await run(box, ["cat"], stdin=b"x" * (1 << 20), limit=2 << 20)
            assert (ran.code, len(ran.stdout.data)) == (0, 1 << 20)
            assert (await sh(box, "sleep 50 & exit 4")).code == 4
            assert (await sh(box, "sleep 50", timeout_s=0.2)).timed_out
            await box.checkpoint()
            assert await box.rewind([]) == ()
            async with box.listen(7000) as listener:
                assert listener.getsockname() == ("127.0.0.1", 7000)

    anyio.run(use, backend_options={"use_uvloop": True})


def _may_run(python: str, paths: str) -> bool:
    code = f"import sys; assert sys.version_info[:2] == {sys.version_info[:2]!r}; import pydantic, anyio, pytest"
    try:
        return _run([python, "-c", code], paths, Path("/")).returncode == 0
    except OSError:
        return False


def _run(command: list[str], paths: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
    everybody = {"env": environment, "cwd": folder, "user": ANYBODY, "group": ANYBODY, "extra_groups": []}
    everybody |= {"capture_output": True, "text": True, "check": False}
    ran: subprocess.CompletedProcess[str] = subprocess.run(command, **everybody)  # type: ignore[call-overload]
    return ran


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not ROOT, reason="we are an ordinary user already")
@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=pytest.mark.slow) if name == "plain verifiers" else name for name in FILES]
)
def test_all_of_it_holds_for_an_ordinary_user_without_a_name(what: str) -> None:
    # A copy that anybody may read: this checkout and its interpreter may lie below a closed folder.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for module in {*NEEDED, *TESTING, "rollcage"}:
            spec = find_spec(module)
            if spec is not None and spec.submodule_search_locations:
                source = Path(next(iter(spec.submodule_search_locations)))
                shutil.copytree(source, folder / "lib" / source.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif spec is not None and spec.origin:
                (folder / "lib").mkdir(exist_ok=True)
                shutil.copy(spec.origin, folder / "lib")
        (folder / "tests").mkdir()
        (folder / "tests" / "support").mkdir()
        for file in FILES[what]:
            shutil.copy(Path(__file__).parent / file, folder / "tests")
        for file in SUPPORT:
            shutil.copy(TESTS / "support" / f"{file}.py", folder / "tests" / "support")
        (folder / "tests" / "conftest.py").write_text(BACKEND)
        (folder / "tests" / "pytest.ini").write_text(
            "[pytest]\nanyio_mode = auto\nfilterwarnings = error\nmarkers = slow\n"
        )
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        (folder / "tmp").mkdir()
        os.chown(folder / "tmp", ANYBODY, ANYBODY)
        lib = str(folder / "lib")
        able = [python for python in (sys.executable, "/usr/bin/python3") if _may_run(python, lib)]
        assert able, "no Python of this version that an ordinary user may run"
        # What the suite finds out about faulty backends does not depend on who runs it.
        options = ["-k", "not found_out and not not_enforced and not hangs"] if what == "conformance" else []
        options += ["-k", "not docs"] if what == "plain verifiers" else []
        # It becomes an ordinary user itself.
        options += ["-k", "not keeps_no_isolated_judge"] if what == "judge and judged" else []
        options += ["-m", "not slow"]
        options += ["-q", "-p", "anyio.pytest_plugin", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp/run"]
        ran = _run([able[0], "-m", "pytest", *options, str(folder / "tests")], lib, folder / "tests")
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
        assert " skipped" not in ran.stdout
