"""`rollcage serve`: rollouts over HTTP, MCP and OpenEnv. The server is imported when it is started."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from rollcage.cli.options import JSON, OTLP, RAY, REPLICAS, seconds_or_zero
from rollcage.errors import UsageError, needs_extra


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; beyond loopback needs keys.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--home", metavar="FOLDER", help="Where the log, the layers and the boxes live.")
@click.option(
    "--at-once", type=click.IntRange(min=1), show_default="8, or all places of --ray", help="Rollouts that run at once."
)
@click.option("--queue", type=click.IntRange(min=0), default=256, show_default=True, help="Rollouts that may wait.")
@click.option(
    "--warm",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="Boxes kept open ahead, with the agent's server started; about 300 MB each.",
)
@click.option("--api-key-file", metavar="FILE", help="Names and hashes of the API keys.")
@click.option("--new-key", metavar="NAME", help="Add a key to --api-key-file, print it once, and leave.")
@click.option("--admin", is_flag=True, help="With --new-key: it may see the rollouts of all keys.")
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
    "--grace",
    type=seconds_or_zero,
    metavar="SECONDS",
    default=5.0,
    show_default=True,
    help="How long they may go on first.",
)
@click.option("--max-body-mb", type=click.IntRange(min=1), default=32, show_default=True, help="Largest request.")
@click.option("--insecure-no-key", is_flag=True, help="Answer other machines without any key.")
@click.option("--quiet", is_flag=True, help="No request log on stderr.")
@REPLICAS
@RAY
@OTLP
@JSON
def serve(new_key: str | None, admin: bool, as_json: bool, home: str | None, **options: Any) -> int:
    """Serve rollouts over HTTP, MCP and OpenEnv.

    Works without any configuration: embedded log, local boxes, no account. Without keys it answers this machine only.
    Ctrl-C stops in order; a second one leaves at once. With --json its address comes as one JSON document.

    \b
    Examples:
      rollcage serve
      rollcage serve --api-key-file keys --new-key alice
      rollcage serve --host 0.0.0.0 --api-key-file keys --at-once 32 --warm 4
      rollcage serve --ray auto --ray-label pool=agents
    """
    if new_key is not None:
        return _new_key(new_key, options["api_key_file"], admin, as_json)
    return _serve(options, home, as_json)


def _new_key(name: str, path: str | None, admin: bool, as_json: bool) -> int:
    if path is None:
        raise click.UsageError("--new-key goes with --api-key-file, which gets the key's hash")
    from rollcage.cli.output import write_json
    from rollcage.server.auth import new_key

    key = new_key(Path(path), name, admin=admin)
    if as_json:
        write_json({"name": name, "key": key, "admin": admin, "file": path})
        return 0
    click.echo(key)
    click.echo(f"rollcage: {path} has the hash of this key; it is shown only now", err=True)
    return 0


def _serve(options: dict[str, Any], home: str | None, as_json: bool) -> int:
    import anyio

    from rollcage.cli.nodes import cluster_of
    from rollcage.cli.output import write_json
    from rollcage.settings import Settings
    from rollcage.wiring import AT_ONCE, MANY

    settings = Settings.from_environ(home=home).sending_traces(options["otlp"], options["otlp_content"])
    settings = settings.with_replicas(options["endpoint_replicas"])
    with needs_extra("the server", "server"):
        from rollcage.server.interpreter import share_arenas
        from rollcage.server.service import ServerLimits
        from rollcage.server.serving import ServeOptions
        from rollcage.server.serving import serve as run
    cluster = cluster_of(options)
    if cluster is not None:
        cluster = cluster.model_copy(update={"warm": options["warm"]})
    wanted = ServeOptions(
        host=options["host"],
        port=options["port"],
        limits=ServerLimits(
            at_once=options["at_once"] or (MANY if cluster else AT_ONCE),
            queue=options["queue"],
            allow_endpoints=tuple(options["allow_endpoint"]),
        ),
        api_key_file=Path(options["api_key_file"]) if options["api_key_file"] else None,
        insecure_no_key=options["insecure_no_key"],
        on_stop=options["on_stop"],
        grace_s=options["grace"],
        max_body_mb=options["max_body_mb"],
        quiet=options["quiet"],
        warm=options["warm"],
        environments=dict(_environment(text) for text in options["environments"]),
        fleet_demo=options["fleet_demo"],
        cluster=cluster,
    )

    def ready(address: str) -> None:
        if as_json:
            write_json({"url": address, "pid": os.getpid(), "home": str(settings.home)})
        else:
            print(
                f"rollcage serves on {address}  (page: /web, API: /docs, MCP: /mcp, log: {settings.log_path})",
                flush=True,
            )

    share_arenas()
    return anyio.run(run, settings, wanted, ready, backend_options={"use_uvloop": True})


def _environment(text: str) -> tuple[str, str]:
    name, found, address = text.partition("=")
    if not found or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or ":" not in address:
        raise UsageError(f"--environment: {text!r} is not NAME=ADDRESS, such as desk=fleet:ticket-desk")
    return name, address
