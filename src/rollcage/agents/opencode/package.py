"""The OpenCode binary: which build, pinned and checked by hash, fetched once, baked into a layer with what it needs."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.packages import Package, fetch, sha512
from rollcage.errors import AgentError, SetupError
from rollcage.sandboxes.base import PATH
from rollcage.sandboxes.layers import Layer

_PACKAGES = {
    # name in the registry: version, SHA-512 of the package as the registry publishes it
    "opencode-linux-x64": (
        "1.18.33",
        "q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==",
    ),
    "opencode-linux-x64-baseline": (
        "1.18.33",
        "1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA==",
    ),
    "opencode-linux-arm64": (
        "1.18.18",
        "e8D3g0qJEIzawEg2+ygW3vkZjAYL2ssyAx4GbihjwXwZFvlZZy5zRWWzdz5KLBoHSTl0FB73vNtnNeXONyHpVQ==",
    ),
}

# A config folder that looks installed keeps OpenCode from fetching its plugin package at every start.
_SEEDS = {
    ".config/opencode/package.json": '{"dependencies":{"@opencode-ai/plugin":"*"}}',
    ".config/opencode/package-lock.json": (
        '{"lockfileVersion":3,"packages":{"":{"dependencies":{"@opencode-ai/plugin":"*"}}}}'
    ),
    ".config/opencode/models.json": "{}",
}


def package_for(machine: str, cpu_flags: Sequence[str]) -> Package:
    """The build for a machine (`platform.machine()`); without AVX2 the baseline one."""
    name = {"x86_64": "opencode-linux-x64", "aarch64": "opencode-linux-arm64"}.get(machine)
    if name is None:
        raise SetupError(f"OpenCode has no build for {machine}", remedy="use an x86_64 or aarch64 machine")
    if machine == "x86_64" and "avx2" not in cpu_flags:
        name += "-baseline"
    return Package(name, *_PACKAGES[name])


def layer_of(package: Package, downloads: Downloads) -> Layer:
    """The base layer of every OpenCode box."""
    ripgrep = shutil.which("rg", path=PATH)
    if ripgrep is None:
        raise SetupError("ripgrep is missing, OpenCode's search tools need it", remedy="run: apt-get install ripgrep")
    key = "\n".join([*package, sha512(Path(ripgrep)), json.dumps(_SEEDS, sort_keys=True), "3"])

    async def build(folder: Path) -> None:
        archive = await fetch(package, downloads.folder, downloads.registry)
        await anyio.to_thread.run_sync(_fill, folder, archive, ripgrep)

    return Layer(name=f"opencode-{package.version}", key=key, build=build)


def _fill(folder: Path, archive: Path, ripgrep: str) -> None:
    binary, search = folder / ".rollcage/bin/opencode", folder / ".cache/opencode/bin/rg"
    binary.parent.mkdir(parents=True)
    search.parent.mkdir(parents=True)
    for path in (".config/opencode/node_modules", ".local/share/opencode", ".local/state/opencode"):
        (folder / path).mkdir(parents=True)
    with tarfile.open(archive) as tar:
        source = tar.extractfile("package/bin/opencode")
        if source is None:
            raise AgentError(f"{archive.name} holds no binary")
        with binary.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    shutil.copyfile(ripgrep, search)
    binary.chmod(0o755)
    search.chmod(0o755)
    for name, text in _SEEDS.items():
        (folder / name).write_text(text)


def cpu_flags() -> Sequence[str]:
    """What this machine's processor can do, as the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line.split()
    return ()
