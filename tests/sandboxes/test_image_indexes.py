"""Images built from real package indexes, as this machine reaches them: pip, npm and apt."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec
from support.image_making import build, said
from support.systems import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def reached(*names: str) -> tuple[str, ...]:
    """These hosts and their addresses: a mirror in one's own network needs both. Skips where they are unknown."""
    try:
        found = {str(entry[4][0]) for name in names for entry in socket.getaddrinfo(name, 443, type=socket.SOCK_STREAM)}
    except OSError as error:
        pytest.skip(f"no package index can be reached here: {error}")
    return (*names, *sorted(found))


def works(argv: Sequence[str], folder: Path) -> bool:
    """Whether the machine itself gets a package this way."""
    return subprocess.run(argv, cwd=folder, capture_output=True, timeout=300).returncode == 0


def hosts_told(argv: Sequence[str], folder: Path) -> list[str]:
    """The hosts that a command which works here speaks of; empty where it does not work."""
    told = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300)
    return sorted(set(re.findall(r"https?://([\w.-]+)", told.stdout))) if told.returncode == 0 else []


async def test_pip_installs_from_the_index_with_what_a_package_depends_on(tmp_path: Path) -> None:
    wanted = ["--no-cache-dir", "-vvv", "--dest", str(tmp_path), "prettytable"]
    if not (told := hosts_told([PYTHON, "-m", "pip", "download", *wanted], tmp_path)):
        pytest.skip("pip gets nothing here")
    hosts = reached(*told)
    async with LocalProvider(tmp_path / "state") as provider:
        await build(provider, "one", "python3 -m pip install prettytable", hosts=hosts)
        async with provider.open(SandboxSpec(template="one")) as box:
            shown = await said(box, "python3 -c 'import prettytable, wcwidth; print(prettytable.__file__)'; env")
        assert "/.local/lib/python3" in shown and "PIP_CERT" not in shown and "PROXY" not in shown.upper()


async def test_npm_installs_a_program_that_is_found_by_name(tmp_path: Path) -> None:
    if not (shutil.which("npm") and works(["npm", "pack", "--silent", "semver"], tmp_path)):
        pytest.skip("npm gets nothing here")
    hosts = reached(*hosts_told(["npm", "config", "get", "registry"], tmp_path))
    async with LocalProvider(tmp_path / "state") as provider:
        made = await build(provider, "one", "npm install -g semver", hosts=hosts)
        assert "NODE_PATH" in made.image.env
        async with provider.open(SandboxSpec(template="one")) as box:
            look = "semver -i minor 1.2.3; node -e \"console.log(require('semver').major('4.5.6'))\""
            assert await said(box, look) == "1.3.0\n4\n"


@pytest.mark.skipif(not shutil.which("apt-get"), reason="no apt here")
async def test_apt_fetches_a_signed_package(tmp_path: Path) -> None:
    if shutil.which("hello"):
        pytest.skip("the package is there already")
    command = ["apt-get", "-q", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout.split()
    hosts = {address.partition("://")[2].partition("/")[0].partition(":")[0] for address in listed}
    if not hosts or not works(["apt-get", "download", "hello"], tmp_path):
        pytest.skip("apt gets nothing here")
    async with LocalProvider(tmp_path / "state") as provider:
        # Those that are of no use now may be out of reach too.
        wanted = reached(*sorted(host for host in hosts if "debian" in host or "ubuntu" in host))
        made = await build(provider, "one", packages=("hello",), hosts=wanted)
        async with provider.open(SandboxSpec(template="one")) as box:
            assert await said(box, "hello --greeting=fetched; ls /usr/share/doc/hello/copyright") == (
                "fetched\n/usr/share/doc/hello/copyright\n"
            )
        assert not made.image.whole
