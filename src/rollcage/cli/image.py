"""`rollcage image`: make, list and remove prebaked boxes. Heavy parts are imported when used."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON
from rollcage.errors import UsageError

if TYPE_CHECKING:
    from rollcage.sandboxes.images.build import Built, Recipe, Say
    from rollcage.sandboxes.images.catalog import Image, ImageStore
    from rollcage.sandboxes.local.provider import LocalProvider
    from rollcage.tasks import TaskFile
    from rollcage.types import JsonObject

ENV = click.option(
    "--env", multiple=True, metavar="NAME=VALUE", help="For every command of its boxes; $PATH is the PATH so far."
)
REBUILD = click.option("--rebuild", is_flag=True, help="Make it even if nothing that goes into it has changed.")


@click.group()
def image() -> None:
    """Prebaked boxes: a task's packages, or a whole system.

    They are ready before the rollout starts.

    \b
    Example:
      rollcage image build pandas --setup 'pip install pandas' --allow-host index.example
      rollcage run TASK.toml --template pandas
    """


@image.command()
@click.argument("name", metavar="NAME_OR_TASK_FOLDER")
@click.option("--setup", multiple=True, metavar="COMMAND", help="Bash, run in the box; may be repeated.")
@click.option("--apt", "packages", multiple=True, metavar="PACKAGE", help="A Debian package; may be repeated.")
@click.option("--apt-source", "sources", multiple=True, metavar="LINE", help="Take packages from there: deb http://...")
@click.option("--from", "base", metavar="IMAGE", help="The image to go on from.")
@click.option("--file", metavar="TASK.toml", help="Bake the files and the setup commands of this task.")
@click.option("--allow-host", "hosts", multiple=True, metavar="HOST", help="What it may reach; nothing else is.")
@ENV
@click.option(
    "--timeout", type=click.FloatRange(min=1), metavar="SECONDS", help="For all of it.  [default: 1800; a task's own]"
)
@click.option("--disk-mb", type=click.IntRange(min=1), help="What it may write.  [default: 4096]")
@click.option("--memory-mb", type=click.IntRange(min=64), help="Memory, what it writes included.  [default: 8192]")
@REBUILD
@JSON
def build(name: str, as_json: bool, **options: Any) -> int:
    """Make the image NAME by commands in a box, or by Dockerfiles.

    What the commands changed below home is the image.

    The same commands on the same base are not run again. pip and npm -g install below home; programs there are found
    by name in every later box of the image.

    The folder of a task in Harbor's format stands for its Dockerfiles: buildah, podman or docker builds them, and each
    image is named by its content. What RUN does is done by that program, with its rights and its network.

    \b
    Example:
      rollcage image build pandas --setup 'pip install pandas' --allow-host index.example
      rollcage image build tasks/fix-the-build
    """
    import anyio

    task = _folder_task(name)
    recipe = _recipe(options)

    async def make(boxes: LocalProvider, say: Say) -> list[Built]:
        from rollcage.cli.task_images import build_images
        from rollcage.sandboxes.images.build import LayerBuilder

        if task:
            return await build_images(boxes, task, say, rebuild=options["rebuild"], timeout_s=options["timeout"])
        return [await LayerBuilder(boxes).build(name, recipe, say, rebuild=options["rebuild"])]

    return anyio.run(_make, make, as_json, f"run {shlex.quote(name)}" if task else "")


@image.command("import")
@click.argument("name")
@click.argument("source", metavar="DIR_OR_TAR")
@click.option("--workdir", metavar="PATH", help="What agents work on, such as /testbed; it becomes the workdir.")
@click.option("--writable", multiple=True, metavar="PATH", help="A further folder that must be written to.")
@click.option(
    "--max-gb",
    type=click.FloatRange(0, min_open=True),
    default=20,
    show_default=True,
    help="What it may come to, unpacked; more is refused.",
)
@ENV
@REBUILD
@JSON
def import_(name: str, source: str, as_json: bool, **options: Any) -> int:
    """Take a root file system as the image NAME.

    Boxes of it show this system and nothing of the host's.

    A folder or a tar archive, as docker or podman export or save it.

    \b
    Example:
      docker save some/image > some.tar
      rollcage image import some some.tar --workdir /testbed
    """
    import anyio

    from rollcage.sandboxes.images.imports import ImageSource, import_image

    system = ImageSource(
        path=Path(source).absolute(),
        workdir=options["workdir"] or "",
        writable=options["writable"],
        env=_variables(options["env"]),
        max_gb=options["max_gb"],
    )

    async def take(boxes: LocalProvider, say: Say) -> list[Built]:
        return [await import_image(boxes, name, system, say, rebuild=options["rebuild"])]

    return anyio.run(_make, take, as_json)


@image.command()
@JSON
def ls(as_json: bool) -> int:
    """List images: size, age, and what each was made from.

    OWN is what no other image has, SHARED what others have too.

    \b
    Example:
      rollcage image ls --json | jq -r '.[].name'
    """
    from rollcage.cli.output import program, write_json
    from rollcage.cli.text import one_line, seconds_of

    images = _images()
    all_images = images.all()
    sizes = images.sizes(all_images)
    rows = [_row(image, *sizes[image.name]) for image in all_images]
    if as_json:
        write_json(rows)
        return codes.OK
    if not rows:
        print(f"no images yet; {program()} image build makes one")
        return codes.OK
    width = max(len(row["name"]) for row in rows)
    print(f"{'NAME':<{width}}  {'OWN':>9}  {'SHARED':>9}  {'AGE':>12}  MADE FROM")
    for row in rows:
        age = seconds_of(max(0.0, time.time() - row["created_at"]))
        own, shared = _size(row["own_bytes"]), _size(row["shared_bytes"])
        print(f"{row['name']:<{width}}  {own:>9}  {shared:>9}  {age:>12}  {one_line(row['source'], 80)}")
    return codes.OK


@image.command()
@click.argument("name")
@JSON
def show(name: str, as_json: bool) -> int:
    """Show one image: size, source, variables, layers.

    \b
    Example:
      rollcage image show pandas
    """
    from rollcage.cli.output import write_json
    from rollcage.cli.text import clean

    images = _images()
    found = images.get(name)
    row = _row(found, *images.sizes(images.all())[name])
    if as_json:
        write_json(row)
        return codes.OK
    shared = f", {_size(row['shared_bytes'])} of it shared with other images" if row["shared_bytes"] else ""
    print(f"{row['name']}  {_size(row['bytes'])}{shared}")
    print(f"made from  {clean(row['source'])}")
    print(f"system     {'its own' if row['whole'] else 'the one of this machine'}")
    for variable, value in row["env"].items():
        print(f"env        {clean(variable)}={clean(value)}")
    for part in row["parts"]:
        print(f"part       {images.layers.folder / part}")
    return codes.OK


@image.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@JSON
def rm(names: tuple[str, ...], as_json: bool) -> int:
    """Remove images. One that an open box uses is not removed.

    \b
    Example:
      rollcage image rm pandas
    """
    import anyio

    from rollcage.cli.output import write_json

    images = _images()
    for name in names:
        images.get(name)
    for name in names:
        anyio.run(images.remove, name)
        if not as_json:
            print(f"{name} is removed")
    if as_json:
        write_json({"removed": list(names)})
    return codes.OK


@image.command()
@JSON
def prune(as_json: bool) -> int:
    """Remove what no image needs.

    Layers of images that are gone, and what builds left that were killed.

    Nothing that an open box uses is removed.

    \b
    Example:
      rollcage image prune
    """
    import anyio

    from rollcage.cli.output import write_json

    freed = anyio.run(_images().prune)
    if as_json:
        write_json({"freed_bytes": freed})
    else:
        print(f"{_size(freed)} freed")
    return codes.OK


@image.command()
@click.argument("name", default="rollcage")
@click.option("--setup", multiple=True, metavar="COMMAND", help="Bash, run as root with a network; may be repeated.")
@click.option("--agent", default="opencode", show_default=True, metavar="NAME", help="The agent that is baked in.")
@JSON
def e2b(name: str, setup: tuple[str, ...], agent: str, as_json: bool) -> int:
    """Build the template NAME in E2B's cloud, with an agent baked in.

    \b
    Examples:
      rollcage image e2b rollcage
      rollcage image e2b rollcage-codex --agent codex
      rollcage run TASK.toml --sandbox e2b --template rollcage-codex --agent codex
    """
    import anyio

    return anyio.run(_e2b, name, setup, agent, as_json)


async def _e2b(name: str, setup: Sequence[str], agent: str, as_json: bool) -> int:
    from rollcage.cli.output import environment, program, write_json
    from rollcage.cli.prepare import known_agent
    from rollcage.sandboxes.e2b.template import TemplateRecipe, build_template
    from rollcage.wiring import e2b_provider

    settings = environment()
    layers = known_agent(settings, agent).layers()
    async with e2b_provider(settings) as provider:
        recipe = TemplateRecipe(layers=layers, setup=setup)
        template_id = await build_template(provider, name, recipe, _progress(as_json))
    if as_json:
        write_json({"name": name, "template_id": template_id})
    else:
        print(f"{name} is ready at E2B: {program()} run TASK.toml --sandbox e2b --template {name}")
    return codes.OK


async def _make(make: Callable[[LocalProvider, Say], Awaitable[list[Built]]], as_json: bool, use: str = "") -> int:
    """Make images and tell of them. `use`: how one uses them, unless by `--template`."""
    import anyio

    from rollcage.cli.interrupts import cancel_at_signal
    from rollcage.cli.output import environment, program, write_json
    from rollcage.cli.text import seconds_of
    from rollcage.wiring import provider

    started, made, sizes = time.monotonic(), [], []
    async with anyio.create_task_group() as tasks, provider(environment()) as boxes:
        tasks.start_soon(cancel_at_signal, tasks.cancel_scope)
        made = await make(boxes, _progress(as_json))
        sizes = [await anyio.to_thread.run_sync(boxes.images.size, image) for image, _ in made]
        tasks.cancel_scope.cancel()
    took = time.monotonic() - started
    for (image, new), size in zip(made, sizes, strict=False):
        if as_json:
            write_json({**image.model_dump(mode="json"), "bytes": size, "new": new, "seconds": took})
        elif new:
            how = use or f"run TASK.toml --template {image.name}"
            print(f"{image.name} is ready ({_size(size)}, {seconds_of(took)}): {program()} {how}")
        else:
            print(f"{image.name} is there already, from the same ({_size(size)}); --rebuild makes it anew")
    return codes.OK if len(sizes) == len(made) > 0 else codes.INTERRUPTED


def _progress(as_json: bool) -> Say:
    """Where the lines of a build go: to stderr, unless only JSON is wanted."""
    from rollcage.cli.text import one_line

    def say(line: str) -> None:
        if not as_json:
            print(one_line(line), file=sys.stderr, flush=True)

    return say


def _images() -> ImageStore:
    from rollcage.cli.output import environment
    from rollcage.wiring import provider

    return provider(environment()).images


def _row(image: Image, own: int, shared: int) -> JsonObject:
    sizes = {"bytes": own + shared, "own_bytes": own, "shared_bytes": shared}
    return {**image.model_dump(mode="json"), **sizes}


def _folder_task(name: str) -> TaskFile | None:
    """The task of a folder, where this names one that images are built from; else it is an image's name."""
    from rollcage.cli.task_images import plans
    from rollcage.tasks import load
    from rollcage.tasks.harbor import is_folder_task

    if not is_folder_task(Path(name)):
        return None
    file = load(name)
    if not plans(file):
        raise UsageError(f"{name}: there is no Dockerfile in it that its boxes are made of")
    return file


def _recipe(options: Mapping[str, Any]) -> Recipe:
    from rollcage.sandboxes.images.build import Recipe
    from rollcage.tasks import load

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
