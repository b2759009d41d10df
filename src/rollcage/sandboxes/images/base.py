"""The base system: one that is the same on every machine, made of Debian's packages, with what tasks expect in a box.

It is an image, named `base`. Its digest is that of our recipe and of every package with its version and content.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from pathlib import Path

import anyio.to_thread

from rollcage.sandboxes.images.build import Built, LayeredProvider, Say, do, take_written
from rollcage.sandboxes.images.catalog import PART, Image
from rollcage.sandboxes.images.debian import Packages, link, trust
from rollcage.sandboxes.images.imports import try_out
from rollcage.sandboxes.layers import Layer
from rollcage.types import BASE as NAME
from rollcage.types import HOME, SandboxSpec

COMMANDS = ("python", "python3", "pip", "pytest", "git", "node", "npm", "gcc", "g++", "make", "rg", "curl")
"""What tasks call by name and the base system has; `doctor` says which of them the host lacks."""
PACKAGES = (
    *("apt", "bash", "ca-certificates", "curl", "file", "g++", "gcc", "git", "jq", "less", "libc6-dev", "make"),
    *("nodejs", "npm", "patch", "procps", "python-is-python3", "python3", "python3-dev", "python3-pip"),
    *("python3-pytest", "python3-venv", "ripgrep", "unzip", "wget", "xz-utils", "zip"),
)
"""By the names that Debian and Ubuntu share; with them comes all that is essential there."""
FORMAT = 1
"""Changes whenever the same packages would give something else."""
_LINKS = {
    "usr/bin/awk": "usr/bin/mawk",
    "usr/bin/cc": "usr/bin/gcc",
    "usr/bin/c++": "usr/bin/g++",
    "usr/bin/c99": "usr/bin/c99-gcc",
    "usr/bin/pager": "usr/bin/less",
    "usr/bin/pytest": "usr/bin/pytest-3",
    "usr/bin/which": "usr/bin/which.debianutils",
}
_LEFT_OUT = "usr/lib/python3*/EXTERNALLY-MANAGED"
"""By which pip refuses to install: the system is read-only in a box, and what is installed lands below home."""
_COMPILED = ".compiled"


async def ensure_base(provider: LayeredProvider, say: Say, *, rebuild: bool = False) -> Built:
    """The image `base` of the packages as they are now; made, or left as it is where it is of the same ones.

    `rebuild`: make it even then.
    """
    async with Packages.chosen(provider.layers.folder.with_name("packages"), PACKAGES, say) as packages:
        digest = _digest(packages)
        if not rebuild and provider.images.made_from(NAME, digest):
            async with provider.images.use(NAME) as image:
                return Built(image, False)

        async def unpacked(folder: Path) -> None:
            await packages.fetch(say)
            say("unpacking")
            await anyio.to_thread.run_sync(_fill, packages, folder / "system")

        salt = str(time.time_ns()) if rebuild else ""
        async with provider.layers.held(Layer(f"{PART}_base", f"{digest}{salt}", unpacked)) as folder:
            release = _release(folder / "system")
            image = Image(
                name=NAME,
                parts=(folder.name,),
                whole=True,
                recipe=digest,
                source=f"{release}: {len(packages.all)} packages, digest {digest[:12]}",
                created_at=time.time(),
            )
            await try_out(provider, image)

            async def compiled(target: Path) -> None:
                say("compiling Python's modules")
                await _compile(provider, image, target)

            async with provider.layers.held(Layer(f"{PART}_compiled", f"{digest}{salt}", compiled)) as over:
                image = image.model_copy(update={"parts": (over.name, folder.name)})
                provider.images.put(image)
        packages.forget()
    await provider.images.prune()
    return Built(image, True)


def _digest(packages: Packages) -> str:
    """Of all that decides what is in it: packages, versions, content, and what we do with them."""
    went_in = [
        FORMAT,
        platform.machine(),
        [[package.file, package.sha256] for package in packages.all],
        _LINKS,
        _LEFT_OUT,
    ]
    return hashlib.sha256(json.dumps(went_in, sort_keys=True).encode()).hexdigest()


def _fill(packages: Packages, system: Path) -> None:
    system.mkdir()
    packages.unpack(system)
    for path in system.glob(_LEFT_OUT):
        path.unlink()
    link(system, _LINKS)
    trust(system)


def _release(system: Path) -> str:
    try:
        lines = (system / "usr/lib/os-release").read_text().splitlines()
    except OSError:
        lines = []
    named = dict(line.split("=", 1) for line in lines if "=" in line)
    return named.get("PRETTY_NAME", "a system of packages").strip('"')


async def _compile(provider: LayeredProvider, image: Image, target: Path) -> None:
    """Compile Python's modules once, and not in every box: its system is read-only, so they would never be kept."""
    spec = SandboxSpec(disk_mb=2048, memory_mb=4096)
    async with provider.open_image(image, spec) as box:
        folders = "/usr/lib/python3 /usr/lib/python3.*/"
        # A few test files of the library are broken on purpose; those stay as they are.
        await do(
            box, f"python3 -m compileall -q -j 2 {folders} || true", {"PYTHONPYCACHEPREFIX": f"{HOME}/{_COMPILED}"}
        )
        await take_written(box, target, _place)


def _place(path: str) -> str | None:
    """Beside its module, where Python looks for what it compiled."""
    if path == _COMPILED:
        return "system"
    if not path.startswith(f"{_COMPILED}/"):
        return None
    inner = path[len(_COMPILED) + 1 :]
    if not inner.endswith(".pyc"):
        return f"system/{inner}"
    above, _, name = inner.rpartition("/")
    return f"system/{above}/__pycache__/{name}"
