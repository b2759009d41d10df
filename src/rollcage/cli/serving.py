"""Starts the server from the command line, and says where it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from rollcage.cli.output import write_json
from rollcage.errors import SetupError, UsageError
from rollcage.settings import Settings


def serve(options: Mapping[str, Any], home: str | None, as_json: bool) -> int:
    """`rollcage serve`."""
    settings = Settings.from_environ(os.environ | ({"ROLLCAGE_HOME": home} if home else {}))
    try:
        from rollcage.server.admission import Limits
        from rollcage.server.serving import Options
        from rollcage.server.serving import serve as run
    except ImportError as error:
        raise SetupError(f"the server needs more packages ({error.name}): pip install 'rollcage[server]'") from error
    wanted = Options(
        host=options["host"],
        port=options["port"],
        limits=Limits(
            at_once=options["at_once"], queue=options["queue"], allow_endpoints=tuple(options["allow_endpoint"])
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
    )

    def ready(address: str) -> None:
        if as_json:
            write_json({"url": address, "pid": os.getpid(), "home": str(settings.home)})
        else:
            print(
                f"rollcage serves on {address}  (page: /web, API: /docs, MCP: /mcp, log: {settings.log_path})",
                flush=True,
            )

    return anyio.run(run, settings, wanted, ready, backend_options={"use_uvloop": True})


def _environment(text: str) -> tuple[str, str]:
    name, found, address = text.partition("=")
    if not found or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or ":" not in address:
        raise UsageError(f"--environment: {text!r} is not NAME=ADDRESS, such as desk=fleet:ticket-desk")
    return name, address
