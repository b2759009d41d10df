"""`rollcage view` and `bundle`: the page, read-only, and as a file. Heavy parts are imported when used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from rollcage.cli import codes
from rollcage.cli.completion import rollout_ids
from rollcage.cli.options import JSON
from rollcage.errors import needs_extra


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; beyond loopback needs keys.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any that is free.")
@click.option("--api-key-file", metavar="FILE", help="Names and hashes of the API keys, as for serve.")
@click.option("--insecure-no-key", is_flag=True, help="Answer other machines without any key.")
@JSON
def view(file: Path | None, as_json: bool, **options: Any) -> int:
    """Open the page read-only on a log or a bundle.

    FILE is a log, a state folder (a backup, say), or an archive that `rollcage bundle` wrote; without it, your own log.
    Nothing can be started, stopped or changed. What others write to the log meanwhile is shown as it comes.

    \b
    Examples:
      rollcage view
      rollcage view /backups/monday
      rollcage view nightly.zip
    """
    import anyio

    from rollcage.cli.output import environment, write_json

    settings = environment()
    with needs_extra("the page", "server"):
        from rollcage.server.serving import ServeOptions
        from rollcage.server.viewing import view as run
    keys = options.pop("api_key_file")
    source = (file or settings.log_path).absolute()

    def ready(address: str) -> None:
        if as_json:
            write_json({"url": address, "pid": os.getpid(), "file": str(source)})
        else:
            print(f"rollcage shows {source} on {address}/web/  (Ctrl-C stops)", flush=True)

    wanted = ServeOptions(api_key_file=Path(keys) if keys else None, **options)
    return anyio.run(run, settings, wanted, source, ready, backend_options={"use_uvloop": True})


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="ID|BATCH...", shell_complete=rollout_ids)
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The archive to write: FILE.zip.",
)
@JSON
def bundle(names: tuple[str, ...], output: Path, as_json: bool) -> int:
    """Write rollouts or batches as a page that needs no server.

    Unpack the archive and open its index.html in any browser, or put the folder on any web server; `rollcage view`
    opens the archive as it is. With several batches they can be compared there. It holds all that the page shows:
    prompts, answers and files included, and no key.

    \b
    Examples:
      rollcage bundle 0a1b -o rollout.zip
      rollcage bundle monday tuesday -o nightly.zip
    """
    import anyio

    from rollcage.cli.log import size_text
    from rollcage.cli.output import environment, write_json
    from rollcage.wiring import opened_log

    with needs_extra("the page", "server"):
        from rollcage.server.bundle import Bundled, write_bundle
    settings = environment()

    async def work() -> Bundled:
        from rollcage.store.batches import batch_names

        async with opened_log(settings) as store:
            known = {name for name, _ in await batch_names(store, limit=1_000_000)}
            batches = [name for name in dict.fromkeys(names) if name in known]
            ids = [await store.find(name) for name in names if name not in known]
            return await write_bundle(store, ids, batches, output)

    done = anyio.run(work)
    if as_json:
        write_json({**done.model_dump(mode="json"), "output": str(output)})
    else:
        of = f" and {', '.join(done.batches)}" if done.batches else ""
        print(f"{done.rollouts} rollouts{of} in {output}, {size_text(done.bytes)}; unpack it and open index.html")
    return codes.OK
