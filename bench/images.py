"""What images cost that share a base: disk, import, and opening a box of one.

    python bench/images.py [--json] [--quick]

Ten saved images on one base, each with layers of its own, as `docker save` writes them. The base is made of this
machine's programs. Disk: what the store uses beside 1.1 times the base and the own layers. Import: CPU time of a later
image beside the first. Open: a box of a layered image with one command run in it, beside one of the host's system; wall
time, in turns, medians and least.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import random
import resource
import statistics
import sysconfig
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from rollcage.sandboxes.base import run
from rollcage.sandboxes.images.imports import ImageSource, import_image
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec

IMAGES = 10
OWN_LAYERS = 4
OWN_FILES = 50
LARGEST = 8 << 20
"""Of a file of the base: a few giants would make it all about writing."""
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
Result = dict[str, float]


def base_layer(quick: bool) -> bytes:
    """A system that boxes can use: this machine's programs, their libraries, Python."""
    libraries = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
    folders = [
        "/usr/bin",
        libraries,
        *([] if quick else ["/usr/lib/python3", "/usr/lib/python3.11", "/usr/share/zoneinfo"]),
    ]
    data = io.BytesIO()

    def small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.islnk() or (entry.isreg() and entry.size > LARGEST) else entry

    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("bin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                tar.add(f"/{name}", name)
        for loader in Path("/usr/lib64").glob("ld-*"):
            tar.add(loader, str(loader)[1:])
        for folder in (folder for folder in folders if Path(folder).is_dir()):
            tar.add(folder, folder[1:], filter=small)
    return data.getvalue()


def own_layer(seed: int) -> bytes:
    """What one RUN would leave: files."""
    generator = random.Random(seed)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for number in range(OWN_FILES):
            content = generator.randbytes(20_000)
            entry = tarfile.TarInfo(f"opt/own/{seed}/{number}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def saved(layers: Sequence[bytes], path: Path) -> Path:
    """As `docker save` writes it."""
    names = [hashlib.sha256(layer).hexdigest() for layer in layers]
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{name}" for name in names]}
    config = json.dumps({"architecture": MACHINES[platform.machine()], "os": "linux", "rootfs": rootfs}).encode()
    listing = [{"Config": "config.json", "RepoTags": None, "Layers": [f"{name}/layer.tar" for name in names]}]
    files = dict(zip((f"{name}/layer.tar" for name in names), layers, strict=True))
    files |= {"config.json": config, "manifest.json": json.dumps(listing).encode()}
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def used(folder: Path) -> int:
    """Bytes on disk below a folder, each file once."""
    found = {each.st_ino: each.st_blocks * 512 for path in folder.rglob("*") for each in [path.lstat()]}
    return sum(found.values())


def cpu() -> float:
    """Seconds of this process and of children that ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


async def opened(provider: LocalProvider, spec: SandboxSpec) -> float:
    """Opening a box and running one command in it."""
    started = anyio.current_time()
    async with provider.open(spec) as box:
        await run(box, ["true"])
    return anyio.current_time() - started


async def measure(folder: Path, quick: bool) -> Result:
    """All of it."""
    base = base_layer(quick)
    parts: dict[str, int] = {}
    spent: list[float] = []
    async with LocalProvider(folder / "state") as provider:
        async with provider.open(SandboxSpec()):
            pass  # what starts with the first box
        for number in range(IMAGES):
            layers = [base, *(own_layer(OWN_LAYERS * number + each) for each in range(OWN_LAYERS))]
            path = saved(layers, folder / "image.tar")
            before = cpu()
            made = await import_image(provider, f"task-{number}", ImageSource(path=path), lambda line: None)
            spent.append(cpu() - before)
            parts |= {part: used(provider.layers.folder / part) for part in made.image.parts}
        rounds = 20 if quick else 60
        times: dict[str, list[float]] = {"host": [], "layered": [], "rooted host": [], "rooted": []}
        for _ in range(rounds):
            times["host"].append(await opened(provider, SandboxSpec()))
            times["layered"].append(await opened(provider, SandboxSpec(template="task-3")))
            times["rooted host"].append(await opened(provider, SandboxSpec(writable_system=True)))
            times["rooted"].append(await opened(provider, SandboxSpec(template="task-3", writable_system=True)))
        middle = {name: statistics.median(each) for name, each in times.items()}
        least = {name: min(each) for name, each in times.items()}
        images = provider.images.all()
        sizes = provider.images.sizes(images)
        base_bytes = max(shared for _, shared in sizes.values())
        own_bytes = sum(own for own, _ in sizes.values())
        disk = used(folder / "state")
    return {
        "images": IMAGES,
        "layers_each": OWN_LAYERS + 1,
        "base_mb": base_bytes / (1 << 20),
        "own_mb": own_bytes / (1 << 20),
        "disk_mb": disk / (1 << 20),
        "disk_ratio": disk / (1.1 * base_bytes + own_bytes),
        "disk_if_unshared_mb": sum(sum(size) for size in sizes.values()) / (1 << 20),
        "import_first_cpu_s": spent[0],
        "import_second_cpu_s": statistics.median(spent[1:]),
        "import_ratio": statistics.median(spent[1:]) / spent[0],
        "open_host_ms": 1000 * middle["host"],
        "open_ratio": middle["layered"] / middle["host"],
        "open_ratio_least": least["layered"] / least["host"],
        "open_rooted_ratio": middle["rooted"] / middle["rooted host"],
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a smaller base, fewer rounds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)  # boxes run as another user
        found = anyio.run(measure, Path(name), options.quick)
    if options.json:
        print(json.dumps(found))
        return
    goals = {"disk_ratio": 1.0, "import_ratio": 0.2, "open_ratio": 1.5, "open_rooted_ratio": 1.5}
    for key, value in found.items():
        goal = f"  (goal: <= {goals[key]:g})" if key in goals else ""
        print(f"{key:<22} {value:10.3f}{goal}")


if __name__ == "__main__":
    main()
