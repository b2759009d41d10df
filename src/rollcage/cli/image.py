"""What can be typed after `rollcage image`. Only click is imported here: help must come at once."""

from __future__ import annotations

from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, and nothing else.")
ENV = click.option(
    "--env", multiple=True, metavar="NAME=VALUE", help="For every command of its boxes; $PATH is the PATH so far."
)
REBUILD = click.option("--rebuild", is_flag=True, help="Make it even if nothing that goes into it has changed.")


@click.group()
def image() -> None:
    """Prebaked boxes: packages of a task, or a whole system, ready before the rollout starts.

    \b
      rollcage image build pandas --setup 'pip install pandas' --allow-host index.example
      rollcage run TASK.toml --template pandas
    """


@image.command()
@click.argument("name")
@click.option("--setup", multiple=True, metavar="COMMAND", help="Bash, run in the box; may be repeated.")
@click.option("--apt", "packages", multiple=True, metavar="PACKAGE", help="A Debian package; may be repeated.")
@click.option("--apt-source", "sources", multiple=True, metavar="LINE", help="Take packages from there: deb http://...")
@click.option("--from", "base", metavar="IMAGE", help="The image to go on from.")
@click.option("--file", metavar="TASK.toml", help="Bake the files and the setup commands of this task.")
@click.option("--allow-host", "hosts", multiple=True, metavar="HOST", help="What it may reach; nothing else is.")
@ENV
@click.option("--timeout", type=click.FloatRange(min=1), metavar="SECONDS", help="For all of it.  [default: 1800]")
@click.option("--disk-mb", type=click.IntRange(min=1), help="What it may write.  [default: 4096]")
@click.option("--memory-mb", type=click.IntRange(min=64), help="Memory, what it writes included.  [default: 8192]")
@REBUILD
@JSON
def build(name: str, as_json: bool, **options: Any) -> int:
    """Run commands in a box and keep what they changed below home as the image NAME.

    The same commands on the same base are not run again. pip and npm -g install below home; programs there are found
    by name in every later box of the image.
    """
    from rollcage.cli import images

    return images.build(name, options, as_json)


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
    """Take a root file system as the image NAME: boxes of it show this system and nothing of the host's.

    A folder or a tar archive, as docker or podman export or save it.

    \b
      docker save some/image > some.tar
      rollcage image import some some.tar --workdir /testbed
    """
    from rollcage.cli import images

    return images.import_(name, source, options, as_json)


@image.command()
@JSON
def ls(as_json: bool) -> int:
    """List images: name, size, age, and what each was made from."""
    from rollcage.cli import images

    return images.ls(as_json)


@image.command()
@click.argument("name")
@JSON
def show(name: str, as_json: bool) -> int:
    """Show one image."""
    from rollcage.cli import images

    return images.show(name, as_json)


@image.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@JSON
def rm(names: tuple[str, ...], as_json: bool) -> int:
    """Remove images. One that an open box uses is not removed."""
    from rollcage.cli import images

    return images.rm(names, as_json)


@image.command()
@click.argument("name", default="rollcage")
@click.option("--setup", multiple=True, metavar="COMMAND", help="Bash, run as root with a network; may be repeated.")
@JSON
def e2b(name: str, setup: tuple[str, ...], as_json: bool) -> int:
    """Build the template NAME in E2B's cloud, with the agent baked in."""
    from rollcage.cli import e2b_image

    return e2b_image.build(name, setup, as_json)
