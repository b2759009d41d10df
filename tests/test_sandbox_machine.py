"""The machine is told apart from what it lacks; the same box works for root and for an ordinary user, on both loops."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, ENODEV, ENOSPC, ENOSYS, EPERM
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

from boxes import ROOT, a_box, python
from rollcage.errors import SetupError
from rollcage.sandboxes import cgroups
from rollcage.sandboxes.base import run, sh
from rollcage.sandboxes.local import LocalProvider
from rollcage.sandboxes.machine import findings, remedy
from rollcage.types import SandboxSpec

ANYBODY = 65533
NEEDED = "anyio pydantic pydantic_core annotated_types typing_inspection typing_extensions idna sniffio uvloop".split()
TESTING = "pytest _pytest py pluggy iniconfig packaging pygments anyio".split()
FILES = "boxes.py test_sandbox_core.py test_sandbox_hostile.py test_sandbox_rewind.py test_layers.py".split()
BACKEND = "import pytest\n@pytest.fixture(scope='session')\ndef anyio_backend():\n    return 'asyncio'\n"


def test_the_findings_name_everything_and_a_remedy_for_what_is_not_there() -> None:
    found = {finding.name: finding for finding in findings()}
    assert set(found) == {
        *("bwrap", "rg", "nsenter", "setpriv", "user namespaces", "overlay in a user namespace", "seccomp"),
        *("cgroup memory", "cgroup pids", "cgroup cpu", "inotify"),
    }
    for name in ("bwrap", "user namespaces", "overlay in a user namespace", "seccomp"):
        assert found[name].ok, found[name]
    assert all(bool(finding.remedy) != finding.ok for finding in found.values())
    assert "bubblewrap" in found["bwrap"].detail


def test_each_refusal_has_its_remedy() -> None:
    assert "6.6" in remedy("keep user attributes on tmpfs", EPERM)
    assert "6.6" in remedy("mount_setattr /tmp/root", ENOSYS)
    assert "sysctl" in remedy("make a user namespace", ENOSPC)
    assert "modprobe overlay" in remedy("mount overlay on /root/home/user", ENODEV)
    assert "layer" in remedy("mount ./x on /tmp/layers/0", EACCES)
    assert "--security-opt" in remedy("make a user namespace", EPERM)


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


@pytest.mark.skipif(not ROOT, reason="we are an ordinary user already")
def test_all_of_it_holds_for_an_ordinary_user_without_a_name() -> None:
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
        for file in FILES:
            shutil.copy(Path(__file__).parent / file, folder / "tests")
        (folder / "tests" / "conftest.py").write_text(BACKEND)
        (folder / "tests" / "pytest.ini").write_text("[pytest]\nanyio_mode = auto\nfilterwarnings = error\n")
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        (folder / "tmp").mkdir()
        os.chown(folder / "tmp", ANYBODY, ANYBODY)
        lib = str(folder / "lib")
        able = [python for python in (sys.executable, "/usr/bin/python3") if _may_run(python, lib)]
        assert able, "no Python of this version that an ordinary user may run"
        options = ["-q", "-p", "anyio.pytest_plugin", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp/run"]
        ran = _run([able[0], "-m", "pytest", *options, str(folder / "tests")], lib, folder / "tests")
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
        assert " skipped" not in ran.stdout
