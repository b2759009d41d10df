"""`rollcage serve`: what can be typed. Only click is imported here; the server is fetched when it is wanted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise click.BadParameter(f"{text!r} is not a number of seconds")
    return number


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; beyond loopback needs keys.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--home", metavar="FOLDER", help="Where the log, the layers and the boxes live.")
@click.option("--at-once", type=click.IntRange(min=1), default=8, show_default=True, help="Rollouts that run at once.")
@click.option("--queue", type=click.IntRange(min=0), default=256, show_default=True, help="Rollouts that may wait.")
@click.option(
    "--warm",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="Boxes kept open ahead, with the agent's server started; about 300 MB each.",
)
@click.option("--api-key-file", metavar="FILE", help="Names and hashes of the keys that may ask.")
@click.option("--new-key", metavar="NAME", help="Add a key to --api-key-file, print it once, and leave.")
@click.option("--admin", is_flag=True, help="With --new-key: it may see everybody's rollouts.")
@click.option(
    "--allow-endpoint", multiple=True, metavar="URL", help="Model addresses callers may name; may be repeated."
)
@click.option(
    "--environment",
    "environments",
    multiple=True,
    metavar="NAME=ADDRESS",
    help="A remote environment callers may name (fleet:KEY, openenv:URL, mcp:URL); may be repeated.",
)
@click.option("--fleet-demo", is_flag=True, help="Run a local Fleet inside and offer its ticket desk: no key needed.")
@click.option(
    "--on-stop",
    type=click.Choice(["abort", "finish"]),
    default="abort",
    show_default=True,
    help="What becomes of open rollouts.",
)
@click.option(
    "--grace", type=_seconds, metavar="SECONDS", default=5.0, show_default=True, help="How long they may go on first."
)
@click.option("--max-body-mb", type=click.IntRange(min=1), default=32, show_default=True, help="Largest request.")
@click.option("--insecure-no-key", is_flag=True, help="Let other machines in without any key.")
@click.option("--quiet", is_flag=True, help="No request log on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Say where it serves as one JSON document.")
def serve(new_key: str | None, admin: bool, as_json: bool, home: str | None, **options: Any) -> int:
    """Serve rollouts over HTTP, MCP and OpenEnv.

    Works without any configuration: embedded log, local boxes, no account. Without keys it answers this machine only.
    Ctrl-C stops in order; a second one leaves at once.
    """
    if new_key is not None:
        return _new_key(new_key, options["api_key_file"], admin)
    from rollcage.cli import serving

    return serving.serve(options, home, as_json)


def _new_key(name: str, path: str | None, admin: bool) -> int:
    if path is None:
        raise click.UsageError("--new-key goes with --api-key-file, which gets the key's hash")
    from rollcage.server.admission import new_key

    key = new_key(Path(path), name, admin=admin)
    click.echo(key)
    click.echo(f"rollcage: {path} has the hash of this key; it is shown only now", err=True)
    return 0
