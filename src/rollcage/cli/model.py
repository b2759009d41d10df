"""`rollcage model`: a small real model on this machine. Heavy parts are imported when used."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON

if TYPE_CHECKING:
    from rich.progress import Progress

    from rollcage.cli.screen import Screen
    from rollcage.local_model import LocalModel

PORT = 8135
"""The default port: the same every time, so that exported variables stay right."""
ABOUT = """\
This is a very small model: 135 million parameters of 4 bits. It shows real sampling and real capture, token by token.
It will not solve tasks: its chat template ignores tools, and it holds 8192 tokens at most. It answers one request at
a time, and on two ordinary cores it reads about 100 tokens a second and writes 15 to 60; on busy ones far fewer."""


@click.group()
def model() -> None:
    """A small real model on this machine.

    For those who have no other at hand.

    \b
    Example:
      rollcage model serve
      rollcage run TASK.toml --endpoint local
    """


@model.command()
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free one.")
@click.option("--context", type=click.IntRange(256, 8192), default=8192, show_default=True, help="Tokens it can hold.")
@click.option("--threads", type=click.IntRange(1, 256), help="Processors it may use.  [default: half of them]")
@JSON
def serve(port: int, context: int, threads: int | None, as_json: bool) -> int:
    """Serve a very small real model until Ctrl-C.

    SmolLM2-135M in llama.cpp's own server; how to reach it is printed. It shows real sampling and real capture; it is
    far too small to solve tasks. Needs the extra rollcage[local-model]; its weights are fetched the first time (93 MB).

    \b
    Example:
      rollcage model serve --threads 4
    """
    import anyio

    from rollcage.cli.output import environment
    from rollcage.cli.screen import screen
    from rollcage.local_model import LocalModel

    settings = environment()
    # A key that is exported already stays right when the model is started again.
    key = settings.endpoints["local"].api_key.get_secret_value()
    local = LocalModel(settings.cache_dir, port=port, context=context, threads=threads, key=key)
    return anyio.run(_serve, local, _Download(screen(settings, file=sys.stderr)), as_json)


async def _serve(local: LocalModel, download: _Download, as_json: bool) -> int:
    import anyio

    from rollcage.cli.interrupts import cancel_at_signal

    local.progress = download.show
    code = codes.INTERRUPTED
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_at_signal, tasks.cancel_scope)
        try:
            async with local:
                download.close()
                _print_address(local, as_json)
                code = codes.OK  # from now on, being stopped is how it ends
                await local.wait()
        finally:
            download.close()
    return code


def _print_address(local: LocalModel, as_json: bool) -> None:
    from rollcage.cli.output import program, write_json
    from rollcage.settings import variable

    endpoint = local.endpoint()
    values = {"base_url": endpoint.base_url, "api_key": endpoint.key.get_secret_value(), "model": endpoint.model}
    if as_json:
        write_json({**values, "pid": local.pid})
        return
    exports = [f"  export {variable('local', field)}={shlex.quote(value)}" for field, value in values.items()]
    lines = [f"{endpoint.model} answers at {endpoint.base_url}", "", ABOUT, "", "In another shell:", *exports]
    print("\n".join([*lines, f"  {program()} run TASK.toml --endpoint local", "", "Ctrl-C stops it."]), flush=True)


class _Download:
    """The download as it goes: a bar on a terminal, one line elsewhere, nothing where there is nothing to fetch."""

    def __init__(self, console: Screen) -> None:
        self._console = console
        self._bar: Progress | None = None

    def show(self, done: int, whole: int) -> None:
        """So many bytes of so many are in."""
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            on_terminal = self._console.is_terminal
            self._bar = Progress(*columns, console=self._console, transient=True, disable=not on_terminal)
            self._bar.add_task("fetching the weights, once", total=whole)
            self._bar.start()
            if not on_terminal:
                self._console.print(f"fetching the local model's weights, once ({whole // 1_000_000} MB)")
        self._bar.update(self._bar.task_ids[0], completed=done)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
