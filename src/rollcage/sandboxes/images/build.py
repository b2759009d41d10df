"""Makes an image from commands: they run in a box, and what they changed below home becomes a part of the image."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio

from rollcage.errors import SandboxError, UsageError
from rollcage.sandboxes.base import PATH, Sandbox, run, sh
from rollcage.sandboxes.images.catalog import PART, Image, ImageStore, check_name
from rollcage.sandboxes.images.tree import Tree, copy
from rollcage.sandboxes.layers import Layer, LayerStore
from rollcage.sandboxes.mirrors import setup_network
from rollcage.types import HOME, SandboxSpec, Value, resolve_box_path

Say = Callable[[str], None]
"""Told what happens, a line at a time."""

FORMAT = "1"
"""Changes whenever the same recipe would give something else."""

BIN = f"{HOME}/.local/bin"
_MODULES = f"{HOME}/.local/lib/node_modules"
_TOOLS = {
    # pip goes to ~/.local by itself where the system's own folder is read-only; this is for systems that forbid it.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "npm_config_prefix": f"{HOME}/.local",
    "npm_config_cache": "/tmp/npm",  # noqa: S108 (in the box, and gone with it)
    "npm_config_update_notifier": "false",
}
"""Beside the plain environment, while an image is built: what installers install lands below home, and their caches
do not."""
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_TRUST = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
"""Installers with certificates of their own are told to trust what the system trusts: an index may be a mirror."""


class Recipe(Value):
    """What an image is made from."""

    base: str = ""
    """The image it goes on from; empty is the plain box."""
    packages: tuple[str, ...] = ()
    """Debian packages, unpacked with what they depend on; none of their scripts are run."""
    sources: tuple[str, ...] = ()
    """Lines of a `sources.list` to take packages from, in place of the system's own."""
    setup: tuple[str, ...] = ()
    """Bash commands, in order; the first that fails ends it."""
    files: dict[str, str] = {}
    """`{path: text}`, written before; a relative path is relative to `workdir`."""
    workdir: str = HOME
    """Where commands start."""
    env: dict[str, str] = {}
    """For the commands, and for every command of a box of this image; `$PATH` in a value is the PATH so far."""
    hosts: tuple[str, ...] = ()
    """What packages and commands may reach; empty is no network. It is not part of what identifies the image."""
    timeout_s: float = 1800
    """For all of it."""
    sandbox: SandboxSpec = SandboxSpec(disk_mb=4096, tmp_mb=1024, memory_mb=8192)
    """The box in which it is made. Disk is memory: what is written counts."""


class Built(NamedTuple):
    """An image, and whether anything had to be done for it."""

    image: Image
    new: bool


class LayeredBox(Sandbox, Protocol):
    """A box whose home is layered, so that what was written in it can be taken as a layer."""

    async def open_upper(self) -> int:
        """A descriptor of the folder with what was written below home, as overlay keeps it. No command may run."""


class LayeredProvider(Protocol):
    """A provider whose boxes are made of images and layers."""

    @property
    def images(self) -> ImageStore:
        """What `template` can name."""

    @property
    def layers(self) -> LayerStore:
        """What images are made of."""

    def open_image(self, image: Image, spec: SandboxSpec) -> AbstractAsyncContextManager[LayeredBox]:
        """A box of an image that need not have a name yet. Its parts must be held while the block lasts."""


class LayerBuilder:
    """Makes images out of layers, in boxes of a provider."""

    def __init__(self, provider: LayeredProvider) -> None:
        self._provider = provider
        self._images = provider.images

    async def build(self, name: str, recipe: Recipe, say: Say, *, rebuild: bool = False) -> Built:
        """The image of that name, made now unless it is there already, from the same recipe."""
        check_name(name)
        if not (recipe.setup or recipe.packages or recipe.files or recipe.env):
            raise UsageError("nothing to build: give --setup, --apt, --file or --env")
        async with AsyncExitStack() as stack:
            base = await stack.enter_async_context(self._images.use(recipe.base))
            digest = digest_of(recipe, base)
            # An image may go on from itself; then what it is made from is another every time.
            if not rebuild and self._images.made_from(name, digest):
                image = await stack.enter_async_context(self._images.use(name))
                if image.recipe == digest:
                    return Built(image, False)
            image = base.model_copy(update={"name": name, "env": merged(base.env, recipe.env)})
            salt = secrets.token_hex(8) if rebuild else ""
            try:
                with anyio.fail_after(recipe.timeout_s):
                    for bake in self._steps(recipe, say):
                        folder = await stack.enter_async_context(self._provider.layers.held(bake(image, salt)))
                        image = image.model_copy(update={"parts": (folder.name, *image.parts)})
            except TimeoutError:
                raise SandboxError(
                    f"the image was not built after {recipe.timeout_s:g} s", remedy="raise --timeout"
                ) from None
            home = [self._provider.layers.folder / part / "home" for part in image.parts]
            env = found_env(home, image.env)
            source = source_of(recipe)
            image = image.model_copy(update={"env": env, "recipe": digest, "source": source, "created_at": time.time()})
            self._images.put(image)
        await self._images.prune()
        return Built(image, True)

    def _steps(self, recipe: Recipe, say: Say) -> list[Callable[[Image, str], Layer]]:
        from rollcage.sandboxes.images import apt

        def packages(base: Image, salt: str) -> Layer:
            async def build(folder: Path) -> None:
                async with self._box(recipe, base) as (box, environment):
                    await apt.fetch(box, recipe, environment, host=not base.whole, say=say)
                    await take_written(box, folder, apt.place(await apt.merged_folders(box)))

            return Layer(f"{PART}_apt", _key(base, "apt", [sorted(recipe.packages), recipe.sources], salt), build)

        def setup(base: Image, salt: str) -> Layer:
            async def build(folder: Path) -> None:
                async with self._box(recipe, base) as (box, environment):
                    await _run_setup(box, recipe, environment, say)
                    await take_written(box, folder, lambda path: f"home/{path}")

            went_in = [recipe.setup, recipe.files, recipe.workdir, base.env]
            return Layer(f"{PART}_setup", _key(base, "setup", went_in, salt), build)

        return [*([packages] if recipe.packages else ()), *([setup] if recipe.setup or recipe.files else ())]

    @asynccontextmanager
    async def _box(self, recipe: Recipe, base: Image) -> AsyncIterator[tuple[LayeredBox, dict[str, str]]]:
        environment = {**_TOOLS, **base.env, "PATH": with_bin(base.env.get("PATH", PATH))}
        async with AsyncExitStack() as stack:
            box = await stack.enter_async_context(self._provider.open_image(base, recipe.sandbox))
            if recipe.hosts:
                environment |= await stack.enter_async_context(setup_network(box, recipe.hosts))
                if (await run(box, ["test", "-s", _CERTIFICATES])).code == 0:
                    environment = {**dict.fromkeys(_TRUST, _CERTIFICATES), **environment}
            yield box, environment


async def _run_setup(box: Sandbox, recipe: Recipe, environment: Mapping[str, str], say: Say) -> None:
    made = await run(box, ["mkdir", "-p", "--", recipe.workdir])
    if made.code:
        raise UsageError(f"workdir {recipe.workdir}: {made.stderr.text.strip()}")
    for path, text in recipe.files.items():
        await box.write(resolve_box_path(path, recipe.workdir), text.encode())
    for command in recipe.setup:
        say(f"$ {command}")
        await do(box, command, environment, cwd=recipe.workdir)


async def do(box: Sandbox, command: str, environment: Mapping[str, str], *, cwd: str = HOME) -> str:
    """Run a command that must succeed; returns what it printed."""
    ended = await sh(box, command, env=environment, cwd=cwd, timeout_s=1 << 30)
    if ended.code:
        said = (ended.stderr.text.strip() or ended.stdout.text.strip()).splitlines()[-3:]
        what = " ".join(command.split())[:200]
        raise SandboxError(f"{what!r} ended with exit code {ended.code}: {' / '.join(said)}")
    return ended.stdout.text


async def take_written(box: LayeredBox, folder: Path, place: Callable[[str], str | None]) -> None:
    """Copy what was written below the box's home to where it belongs in a part."""
    upper = await box.open_upper()
    try:
        await anyio.to_thread.run_sync(_fill, folder, upper, place)
    except OSError as error:
        raise SandboxError(f"cannot keep what was built: {error.filename or ''} {error.strerror}") from error
    finally:
        os.close(upper)


def _fill(folder: Path, upper: int, place: Callable[[str], str | None]) -> None:
    with Tree(folder) as tree:
        copy(upper, tree, place, overlay=True)


def digest_of(recipe: Recipe, base: Image) -> str:
    """Names what goes in: not who may be reached meanwhile, nor how large the box is."""
    went_in = [
        sorted(recipe.packages),
        recipe.sources,
        recipe.setup,
        recipe.files,
        recipe.workdir,
        recipe.env,
        base.env,
    ]
    return _key(base, "recipe", went_in, "")


def _key(base: Image, kind: str, went_in: Sequence[object], salt: str) -> str:
    system = "" if base.whole else host_system()
    text = json.dumps([FORMAT, kind, base.parts, system, went_in, salt], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def host_system() -> str:
    """What kind of system the host is: programs built on one may not run on another."""
    try:
        release = Path("/etc/os-release").read_text()
    except OSError:
        release = ""
    named = [line for line in release.splitlines() if line.startswith(("ID=", "VERSION_ID="))]
    return "\n".join([platform.machine(), *sorted(named)])


def merged(below: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """An environment with more laid over it; `$PATH` in a value is the PATH below."""
    path = below.get("PATH", PATH)
    return {
        **below,
        **{name: value.replace("${PATH}", "$PATH").replace("$PATH", path) for name, value in given.items()},
    }


def with_bin(path: str) -> str:
    """A PATH on which programs that were installed below home are found."""
    return path if BIN in path.split(":") else f"{BIN}:{path}"


def found_env(homes: Sequence[Path], env: Mapping[str, str]) -> dict[str, str]:
    """Adds what makes installed programs and modules be found by name."""
    found = dict(env)
    if any((home / ".local/bin").is_dir() for home in homes):
        found["PATH"] = with_bin(found.get("PATH", PATH))
    if "NODE_PATH" not in found and any((home / ".local/lib/node_modules").is_dir() for home in homes):
        found["NODE_PATH"] = _MODULES
    return found


def source_of(recipe: Recipe) -> str:
    """What it was made from, in a line."""
    words = [f"from {recipe.base}"] if recipe.base else []
    words += [f"apt {' '.join(recipe.packages)}"] if recipe.packages else []
    words += [f"{len(recipe.files)} files"] if recipe.files else []
    words += [shlex.join([command]) if "\n" in command else command for command in recipe.setup]
    words += [f"env {' '.join(recipe.env)}"] if recipe.env else []
    return "; ".join(words)[:500]
