"""Agents from PyPI: wheels pinned by hash, in a layer, run by the box's own python3."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import ClassVar, Self

import anyio
import anyio.to_thread

from rollcage.agents.base import one_version
from rollcage.agents.cli_agent import INSTALLED, CliAgent
from rollcage.errors import AgentError, SetupError
from rollcage.sandboxes.layers import Layer

_LACKING = "it needs python3, which this box lacks; choose an image that has it"
_START = f'command -v python3 >/dev/null || {{ echo \'{_LACKING}\' >&2; exit 127; }}; exec python3 -I "$0" "$@"'


class PythonAgent(CliAgent):
    """An agent whose wheels are on PyPI. Its box needs a python3 of one of the versions it has wheels for.

    `locks/NAME.json`: `{folder: {wheel: SHA-256}}`, the folder `any` for every python3, `cp311-x86_64` for one.
    """

    driver: ClassVar[str]
    """The program that python3 runs: a script that puts the wheels on its path, given as text."""

    def at_version(self, version: str) -> Self:
        """There is none: it is pinned with all it needs, and its driver is written for it."""
        if version != self.version:
            raise one_version(self)
        return self

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
        wheels, kept = self.wheels(), self.downloads.folder
        key = json.dumps([wheels, self.driver, 2], sort_keys=True)

        async def build(folder: Path) -> None:
            place = folder / INSTALLED / self.name
            await fetch_wheels({file: digest for files in wheels.values() for file, digest in files.items()}, kept)
            for version, files in wheels.items():
                for file in files:
                    await anyio.to_thread.run_sync(_unpack, kept / file, place / version)
            (place / "driver.py").write_text(self.driver, encoding="utf-8")
            await _compile(place)

        return [Layer(name=f"{self.name}-{self.version}", key=key, build=build)]


async def fetch_wheels(wanted: Mapping[str, str], downloads: Path) -> None:
    """Wheels by their file names, downloaded once by pip and checked against their SHA-256."""
    await anyio.Path(downloads).mkdir(parents=True, exist_ok=True)
    together: dict[str, list[str]] = {}
    for file, digest in wanted.items():
        if not (downloads / file).exists() or _sha256(downloads / file) != digest:
            together.setdefault("-".join(file.removesuffix(".whl").split("-")[2:]), []).append(file)
    for tags, files in together.items():
        with tempfile.TemporaryDirectory(dir=downloads) as folder:
            await _download(tags, files, Path(folder))
            for file in files:
                if _sha256(Path(folder, file)) != wanted[file]:
                    raise AgentError(f"{file} is not what was pinned: its SHA-256 differs; it was thrown away")
                await anyio.Path(folder, file).replace(downloads / file)


async def _download(tags: str, files: Sequence[str], folder: Path) -> None:
    """Wheels that are for the same Pythons and machines: pip starts once for all of them."""
    python, abi, systems = tags.split("-")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--only-binary", ":all:", "--dest", str(folder), "--implementation", python[:2], "--abi", abi]
    # What is for every Python is asked for as for the oldest one that will do.
    argv += ["--python-version", "3.10" if python.endswith("py3") else python[2:]]
    argv += [word for system in systems.split(".") for word in ("--platform", system)]
    done = await anyio.run_process([*argv, *("==".join(file.split("-")[:2]) for file in files)], check=False)
    missing = [file for file in files if not await anyio.Path(folder, file).exists()]
    if done.returncode or missing:
        said = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise SetupError(
            f"pip could not fetch {', '.join(missing or files)}: {said}", remedy="check the network and run it again"
        )


async def _compile(place: Path) -> None:
    """Byte code for this machine's own python3, which its boxes have as well: else each start would compile anew.

    A box with another one compiles by itself.
    """
    python = shutil.which("python3", path=os.defpath) or sys.executable
    # It goes by the source's hash, which nobody checks: times differ from box to box, and the layer never changes.
    options = ["-q", "--invalidation-mode", "unchecked-hash", "-s", str(place)]
    argv = [python, "-I", "-m", "compileall", *options, str(place)]
    await anyio.run_process(argv, check=False)  # what is no Python of this version stays as it is


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)  # its hash is pinned, and zipfile lets nothing lead out
