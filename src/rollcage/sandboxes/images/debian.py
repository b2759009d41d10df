"""Debian's packages for a system of our own: chosen, checked and fetched by this machine's apt, unpacked here.

No root is needed, nothing of this machine's own packages is changed, and none of the packages' scripts is run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from rollcage.errors import SetupError
from rollcage.locks import locked
from rollcage.sandboxes.images.tree import Tree, unpack

Say = Callable[[str], None]

_PROGRAMS = ("apt-get", "dpkg-deb")
_LINE = re.compile(r"'[^']+' (?P<file>\S+) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})")
_HOOKS = ("APT::Update::Pre-Invoke", "APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success", "DPkg")
_LEFT_OUT = tuple(f"usr/share/{name}/" for name in ("doc", "info", "lintian", "locale", "man"))
_MERGED = ("bin", "lib", "lib64", "sbin")
_STEP = 20
"""Percent between two lines of progress."""


class DebianPackage(NamedTuple):
    """One archive that apt chose."""

    file: str
    """`NAME_VERSION_ARCHITECTURE.deb`."""
    size: int
    sha256: str


class Packages:
    """The packages that some names stand for, with all they depend on, as this machine's sources have them now."""

    def __init__(self, folder: Path, names: Sequence[str], chosen: Sequence[DebianPackage]) -> None:
        """Made by `Packages.chosen`."""
        self._folder, self._names, self.all = folder, tuple(names), tuple(sorted(chosen))

    @classmethod
    @asynccontextmanager
    async def chosen(cls, folder: Path, names: Sequence[str], say: Say) -> AsyncIterator[Packages]:
        """Ask apt. It keeps its lists and archives in `folder`, which is ours while the block lasts."""
        missing = [program for program in _PROGRAMS if not shutil.which(program)]
        if missing:
            raise SetupError(
                f"this machine has no {' and no '.join(missing)}, which fetch Debian's packages",
                remedy="use {system} host, or import a system: rollcage image import base DIR_OR_TAR",
            )
        for name in ("state/lists/partial", "cache/archives/partial", "log"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        async with locked(folder / ".lock"):
            (folder / "status").write_text("")
            (folder / "apt.conf").write_text(_settings(folder))
            say("asking this machine's package sources")
            await _apt(folder, ["-q", "update"])
            listed = await _apt(folder, ["-qq", "--print-uris", "install", *names, "?essential"])
            chosen = [_LINE.fullmatch(line) for line in listed.splitlines()]
            found = [DebianPackage(line["file"], int(line["size"]), line["sha256"]) for line in chosen if line]
            if not found or len(found) != len(chosen):
                raise SetupError("apt named no archives for the base system", remedy="see: apt-get update")
            yield cls(folder, names, found)

    async def fetch(self, say: Say) -> None:
        """Download what is not there yet; apt checks every archive against what the sources signed."""
        size = sum(package.size for package in self.all) / 1e6
        say(f"fetching {len(self.all)} packages, {size:.0f} MB")
        command = ["-qq", "-y", "-o", "APT::Status-Fd=1", "--download-only", "install", *self._names, "?essential"]
        next_said = _STEP

        def told(line: str) -> None:
            nonlocal next_said
            kind, _, rest = line.partition(":")
            percent = rest.split(":")[1] if kind == "dlstatus" and rest.count(":") >= 2 else "0"
            if float(percent) >= next_said:
                say(f"fetched {next_said} %")
                next_said += _STEP

        await _apt(self._folder, command, told)

    def unpack(self, system: Path) -> None:
        """Write what they hold to an empty folder, and the list of them as dpkg keeps it. Takes a while."""
        for name in _MERGED:
            (system / "usr" / name).mkdir(parents=True)
            (system / name).symlink_to(f"usr/{name}")
        paragraphs = []
        with Tree(system) as tree:
            for package in self.all:
                archive = self._folder / "cache/archives" / package.file
                with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as process:
                    assert process.stdout is not None
                    unpack(process.stdout, tree, _taken)  # type: ignore[arg-type]
                if process.returncode:
                    raise SetupError(f"{package.file} cannot be unpacked", remedy=f"remove {archive} and try again")
                field = subprocess.run(["dpkg-deb", "--field", archive], stdout=subprocess.PIPE, check=True, text=True)
                name, _, rest = field.stdout.partition("\n")
                paragraphs.append(f"{name}\nStatus: install ok installed\n{rest.strip()}\n")
        (system / "var/lib/dpkg").mkdir(parents=True, exist_ok=True)
        (system / "var/lib/dpkg/status").write_text("\n".join(paragraphs))

    def forget(self) -> None:
        """Remove the archives: what they held is unpacked."""
        for package in self.all:
            (self._folder / "cache/archives" / package.file).unlink(missing_ok=True)


def link(system: Path, links: Mapping[str, str]) -> None:
    """Make the links that are not there and whose target is: what the packages' scripts would choose among several."""
    for name, target in links.items():
        if (system / target).exists() and not (system / name).exists():
            (system / name).symlink_to(f"/{target}")


def trust(system: Path) -> None:
    """Gather the certificates of the package `ca-certificates` in the one file that programs read."""
    certificates = sorted((system / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = system / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_bytes(b"".join(path.read_bytes().strip() + b"\n" for path in certificates))


def _taken(path: str) -> str | None:
    return None if path.startswith(_LEFT_OUT) else path


def _settings(folder: Path) -> str:
    """Over this machine's own: sources, keys, proxies and credentials are its, all that is written is ours."""
    cleared = "".join(f"#clear {name};\n" for name in _HOOKS)
    return f"""{cleared}
        Dir::State "{folder}/state"; Dir::State::status "{folder}/status";
        Dir::Cache "{folder}/cache"; Dir::Log "{folder}/log";
        APT::Install-Recommends "false"; APT::Sandbox::User ""; Acquire::ForceHash "SHA256";
        Acquire::Languages "none"; Acquire::Retries "3";
    """


async def _apt(folder: Path, words: Sequence[str], told: Callable[[str], None] = lambda line: None) -> str:
    """Run apt-get to its end; what it printed. `told` gets each line at once."""
    printed: list[str] = []
    errors: list[bytes] = []
    command = ["apt-get", "-c", str(folder / "apt.conf"), *words]
    async with (
        await anyio.open_process(command, stdin=subprocess.DEVNULL) as process,
        anyio.create_task_group() as group,
    ):

        async def listen() -> None:
            assert process.stderr is not None
            async for chunk in process.stderr:
                errors.append(chunk)

        group.start_soon(listen)
        assert process.stdout is not None
        rest = ""
        async for chunk in process.stdout:
            *lines, rest = (rest + chunk.decode("utf-8", "replace")).split("\n")
            for line in lines:
                printed.append(line)
                told(line)
        await process.wait()
    if process.returncode:
        said = [line for line in b"".join(errors).decode("utf-8", "replace").splitlines() if line.strip()][-3:]
        raise SetupError(
            f"apt-get {words[-1] if words[-1] == 'update' else 'install'} ended with exit code {process.returncode}: "
            f"{' / '.join(said)}",
            remedy="see that this machine's package sources can be reached: apt-get update",
        )
    return "\n".join(printed)
