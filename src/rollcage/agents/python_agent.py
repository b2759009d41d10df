"""Agents from PyPI: wheels pinned by hash, in a layer, run by the box's own python3."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.to_thread

from rollcage.agents.cli_agent import INSTALLED, CliAgent
from rollcage.errors import AgentError, SetupError
from rollcage.sandboxes.layers import Layer

NO_PYTHON = 91
"""The exit code where a box has no python3."""
_START = f'command -v python3 >/dev/null || exit {NO_PYTHON}; exec python3 -I "$0" "$@"'


class PythonAgent(CliAgent):
    """An agent whose wheels are on PyPI. Its box needs a python3 of one of the versions it has wheels for.

    `locks/NAME.json`: `{folder: {wheel: SHA-256}}`, the folder `any` for every python3, `cp311-x86_64` for one.
    """

    driver: ClassVar[str]
    """The program that python3 runs: a script that puts the wheels on its path, given as text."""

    @property
    def program(self) -> Sequence[str]:
        """python3 and the driver."""
        return ["sh", "-c", _START, f"{self.home}/driver.py"]

    def wheels(self) -> Mapping[str, Mapping[str, str]]:
        """What is unpacked where: for this kind of machine, and every version of Python."""
        lock = resources.files(__package__).joinpath("locks", f"{self.name}.json").read_text(encoding="utf-8")
        machine = platform.machine()
        return {
            folder.partition("-")[0]: files
            for folder, files in json.loads(lock).items()
            if folder == "any" or folder.endswith(f"-{machine}")
        }

    def layers(self) -> Sequence[Layer]:
        """One: the wheels, unpacked, and the driver."""
        if not self.pinned:
            raise SetupError(f"{self.name} is pinned with all it needs, in version {type(self).version} only")
        wheels = self.wheels()
        key = json.dumps([wheels, self.driver, 1], sort_keys=True)

        async def build(folder: Path) -> None:
            place = folder / INSTALLED / self.name
            for version, files in wheels.items():
                for file, digest in files.items():
                    wheel = await fetch_wheel(file, digest, self.downloads.folder)
                    await anyio.to_thread.run_sync(_unpack, wheel, place / version)
            (place / "driver.py").write_text(self.driver, encoding="utf-8")

        return [Layer(name=f"{self.name}-{self.version}", key=key, build=build)]


async def fetch_wheel(file: str, digest: str, downloads: Path) -> Path:
    """A wheel by its file name, downloaded once by pip and checked against its SHA-256."""
    kept = downloads / file
    if kept.exists() and _sha256(kept) == digest:
        return kept
    await anyio.Path(downloads).mkdir(parents=True, exist_ok=True)
    name, version, python, abi, systems = file.removesuffix(".whl").split("-")
    tags = [word for system in systems.split(".") for word in ("--platform", system)]
    with tempfile.TemporaryDirectory(dir=downloads) as folder:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        argv += ["--only-binary", ":all:", "--dest", folder, *tags, "--implementation", python[:2]]
        # What is for every Python is asked for as for the oldest one that will do.
        least = "3.10" if python.endswith("py3") else python[2:]
        argv += ["--python-version", least, "--abi", abi, f"{name}=={version}"]
        done = await anyio.run_process(argv, check=False)
        found = Path(folder, file)
        if done.returncode or not await anyio.Path(found).exists():
            said = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
            raise SetupError(f"pip could not fetch {file}: {said}; check the network and run it again")
        if _sha256(found) != digest:
            raise AgentError(f"{file} is not what was pinned: its SHA-256 differs; it was thrown away")
        await anyio.Path(found).replace(kept)
    return kept


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)  # its hash is pinned, and zipfile lets nothing lead out
