"""A container engine for the tests: the machine's own where one answers, else a podman of our own, else none."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from rollcage.errors import SetupError
from rollcage.sandboxes.container.engine import ContainerEngine
from rollcage.settings import Settings
from support.packages import install


def answers(address: str) -> bool:
    """Whether an engine answers there."""
    return "no container engine answers" not in trouble(address, start=False)


def trouble(address: str, *, start: bool = True) -> str:
    """Why an engine is of no use, or cannot start any container; empty where it can."""

    async def ask() -> None:
        engine = await ContainerEngine.open([address])
        try:
            if start:
                await engine.check_runtime()
        finally:
            engine.close()

    try:
        anyio.run(ask)
    except SetupError as error:
        return str(error)
    return ""


@contextmanager
def an_engine() -> Iterator[str]:
    """The address of an engine. Skips the tests where there is none and none can be started."""
    for address in Settings.from_environ(os.environ).engines:
        if address.startswith("unix://") and not trouble(address):
            yield address
            return
    need_podman()
    with (
        # Not below pytest's own folder: podman refuses a path of more than 50 characters.
        tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as folder,
        # crun refuses machines with both kinds of cgroups, runc does not.
        podman(Path(folder), "runc" if shutil.which("runc") else "") as address,
    ):
        if why := trouble(address):
            pytest.skip(why)
        yield address


@contextmanager
def podman(folder: Path, runtime: str) -> Iterator[str]:
    """The address of a podman of our own with this runtime; empty: its usual one."""
    address = f"unix://{folder}/podman.sock"
    options = ["--root", f"{folder}/root", "--runroot", f"{folder}/run", "--cgroup-manager", "cgroupfs"]
    options += ["--events-backend", "file", *(["--runtime", runtime] if runtime else [])]
    with (folder / "log").open("wb") as log:
        # The signal is for the case that we are killed.
        argv = ["setpriv", "--pdeathsig", "TERM", "podman", *options, "system", "service", "--time=0", address]
        # Its helpers leave files (`oom`) in the folder that it was started in.
        service = subprocess.Popen(argv, stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + 120
        while not answers(address):
            if service.poll() is not None or time.monotonic() > deadline:
                said = (folder / "log").read_text(errors="replace").strip()[-400:]
                pytest.skip(f"podman does not serve its API here: {said}")
            time.sleep(0.1)
        yield address
    finally:
        service.terminate()
        service.wait()
        _forget(folder, options)


def need_podman() -> None:
    """Skip where there is none and none can be had."""
    if os.geteuid() != 0:
        pytest.skip("no container engine answers, and only root can start one here")
    install("podman", "runc")
    if not shutil.which("podman"):
        pytest.skip("no container engine answers; scripts/container.sh installs one")


def need_buildah() -> None:
    """Skip where there is none and none can be had."""
    if os.geteuid() != 0:
        pytest.skip("a build in a chroot wants root")
    install("buildah")
    if not shutil.which("buildah"):
        pytest.skip("buildah is not installed; scripts/container.sh buildah installs it")


def need_lent_ids() -> None:
    """Skip where no ordinary user can be lent ids."""
    need_buildah()
    if not shutil.which("newuidmap"):
        install("uidmap")
    if not shutil.which("newuidmap") or not shutil.which("unshare"):
        pytest.skip("newuidmap or unshare is not installed; scripts/container.sh uidmap installs the first")


def need_base(folder: Path, tag: str, *, more: str = "") -> None:
    """A base image of Debian's packages, made here and tagged so; skip where their mirror gives nothing in time."""
    need_buildah()
    install("mmdebstrap")
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("debian.sources"))]
    mirror = next((str(path) for path in sources if path.is_file()), "")
    if not shutil.which("mmdebstrap") or not mirror:
        pytest.skip("mmdebstrap or Debian's sources are not here")
    release = subprocess.run(["sh", "-c", ". /etc/os-release; echo $VERSION_CODENAME"], capture_output=True, text=True)
    archive = folder / "base.tar"
    make = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include=ca-certificates{more}", release.stdout.strip()]
    try:
        made = subprocess.run([*make, str(archive), mirror], capture_output=True, text=True, timeout=400)
    except subprocess.TimeoutExpired:
        pytest.skip("a base was not made in time")
    if made.returncode:
        pytest.skip(f"a base cannot be made: {made.stderr[-300:]}")
    script = 'c=$(buildah from scratch) && buildah add -q $c "$1" / && buildah commit -q $c "$2"; buildah rm $c'
    subprocess.run(["bash", "-c", script, "base", str(archive), tag], check=True, capture_output=True)
    archive.unlink()


def _forget(folder: Path, options: list[str]) -> None:
    subprocess.run(["podman", *options, "rm", "--all", "--force"], capture_output=True)
    for mounted in ("root/overlay", "run"):
        subprocess.run(["umount", "--recursive", "--lazy", str(folder / mounted)], capture_output=True)
    with suppress(OSError):
        shutil.rmtree(folder)
