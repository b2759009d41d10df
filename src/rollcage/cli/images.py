"""Makes, lists and removes images from the command line."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from rollcage.assembly import provider
from rollcage.cli import codes
from rollcage.cli.output import environment, program, write_json
from rollcage.cli.text import clean, one_line, seconds_of
from rollcage.errors import UsageError
from rollcage.images.build import Builder, Built, LocalBuilder, Recipe, Say
from rollcage.images.imports import Source, import_image
from rollcage.images.store import Image, ImageStore
from rollcage.sandboxes.local import LocalProvider
from rollcage.tasks import load
from rollcage.types import JsonObject

BUILDERS: Mapping[str, Callable[[LocalProvider], Builder]] = {"local": LocalBuilder}
"""Who makes images, by backend."""


def build(name: str, options: Mapping[str, Any], as_json: bool) -> int:
    """`rollcage image build`."""
    recipe = _recipe(options)

    async def make(boxes: LocalProvider, say: Say) -> Built:
        return await BUILDERS["local"](boxes).build(name, recipe, say, rebuild=options["rebuild"])

    return anyio.run(_make, make, as_json)


def import_(name: str, path: str, options: Mapping[str, Any], as_json: bool) -> int:
    """`rollcage image import`."""
    source = Source(
        path=Path(path).absolute(),
        workdir=options["workdir"] or "",
        writable=options["writable"],
        env=_variables(options["env"]),
        max_gb=options["max_gb"],
    )

    async def take(boxes: LocalProvider, say: Say) -> Built:
        return await import_image(boxes, name, source, say, rebuild=options["rebuild"])

    return anyio.run(_make, take, as_json)


async def _make(make: Callable[[LocalProvider, Say], Awaitable[Built]], as_json: bool) -> int:
    def say(line: str) -> None:
        if not as_json:
            print(one_line(line), file=sys.stderr, flush=True)

    started, built = time.monotonic(), None
    async with anyio.create_task_group() as tasks, provider(environment()) as boxes:
        tasks.start_soon(_stop_at_signal, tasks.cancel_scope)
        built = await make(boxes, say)
        size = await anyio.to_thread.run_sync(boxes.images.size, built.image)
        tasks.cancel_scope.cancel()
    if built is None:
        return codes.INTERRUPTED
    image, took = built.image, time.monotonic() - started
    if as_json:
        write_json({**image.model_dump(mode="json"), "bytes": size, "new": built.new, "seconds": took})
    elif built.new:
        print(
            f"{image.name} is ready ({_size(size)}, {seconds_of(took)}): "
            f"{program()} run TASK.toml --template {image.name}"
        )
    else:
        print(f"{image.name} is there already, from the same ({_size(size)}); --rebuild makes it anew")
    return codes.SUCCEEDED


async def _stop_at_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return


def ls(as_json: bool) -> int:
    """`rollcage image ls`."""
    images = _images()
    rows = [_row(images, image) for image in images.all()]
    if as_json:
        write_json(rows)
        return codes.SUCCEEDED
    if not rows:
        print(f"no images yet; {program()} image build makes one")
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        age = seconds_of(max(0.0, time.time() - row["created_at"]))
        print(f"{row['name']:<{width}}  {_size(row['bytes']):>8}  {age:>12}  {one_line(row['source'], 80)}")
    return codes.SUCCEEDED


def show(name: str, as_json: bool) -> int:
    """`rollcage image show`."""
    images = _images()
    row = _row(images, images.get(name))
    if as_json:
        write_json(row)
        return codes.SUCCEEDED
    print(f"{row['name']}  {_size(row['bytes'])}")
    print(f"made from  {clean(row['source'])}")
    print(f"system     {'its own' if row['whole'] else 'the one of this machine'}")
    for variable, value in row["env"].items():
        print(f"env        {clean(variable)}={clean(value)}")
    for part in row["parts"]:
        print(f"part       {images.layers.folder / part}")
    return codes.SUCCEEDED


def rm(names: Sequence[str], as_json: bool) -> int:
    """`rollcage image rm`."""
    images = _images()
    for name in names:
        images.get(name)
    for name in names:
        anyio.run(images.remove, name)
        if not as_json:
            print(f"{name} is removed")
    if as_json:
        write_json({"removed": list(names)})
    return codes.SUCCEEDED


def _images() -> ImageStore:
    return provider(environment()).images


def _row(images: ImageStore, image: Image) -> JsonObject:
    return {**image.model_dump(mode="json"), "bytes": images.size(image)}


def _recipe(options: Mapping[str, Any]) -> Recipe:
    recipe = Recipe(
        base=options["base"] or "",
        packages=options["packages"],
        sources=options["sources"],
        setup=options["setup"],
        env=_variables(options["env"]),
        hosts=options["hosts"],
        timeout_s=options["timeout"] or Recipe().timeout_s,
    )
    if options["file"]:
        file = load(options["file"])
        recipe = recipe.model_copy(
            update={
                "base": recipe.base or file.sandbox.template,
                "setup": (*file.task.setup, *recipe.setup),
                "files": file.task.files,
                "workdir": file.task.workdir,
                "hosts": (*file.sandbox.setup_hosts, *recipe.hosts),
            }
        )
    limits = {name: options[name] for name in ("disk_mb", "memory_mb") if options[name] is not None}
    return recipe.model_copy(update={"sandbox": recipe.sandbox.model_copy(update=limits)})


def _variables(words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise UsageError(f"--env {name!r}: give NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MB" if count < 1 << 30 else f"{count / (1 << 30):.2f} GB"
