"""A real server process with the MCP endpoint and the environment, for tests; prints its port when it listens."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOLD = "while [ ! -e /nowhere ]; do sleep 0.1; done"
"""An instruction for the agent `shell` that never ends by itself."""


def shell(script: str, **more: Any) -> dict[str, Any]:
    """The arguments of a rollout in which bash is the agent."""
    return {"instruction": script, "agent": "shell", "endpoint": "scripted", **more}


@contextmanager
def served(home: Path, *, port: int = 0, sessions: int = 64) -> Iterator[str]:
    """The server as a process of its own; its address. It is killed at the end, as by a power cut.

    Without any `sessions` there is no environment, and it starts the sooner.
    """
    options = ["--home", str(home), "--port", str(port), "--sessions", str(sessions)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENENV_", "ENABLE_WEB"))}
    with subprocess.Popen([sys.executable, __file__, *options], stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline().decode().strip()
            assert said.isdigit(), f"the server did not start: {said!r}"
            yield f"http://127.0.0.1:{said}"
        finally:
            process.send_signal(signal.SIGKILL)


def _environment(service: Any, sessions: int) -> Any:
    if sessions:
        from rollcage.server import openenv as environment

        return environment.build(service, sessions=sessions)

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("there is no environment here")

    return nothing


async def main(home: str, port: int, sessions: int) -> None:
    import uvicorn

    from rollcage.server import mcp
    from rollcage.server.service import Service
    from rollcage.settings import Settings

    settings = Settings.from_environ({**os.environ, "ROLLCAGE_HOME": home})
    async with Service.open(settings) as service:
        gym = _environment(service, sessions)
        tools = mcp.build(service, gym, keep_alive_s=0.3)

        async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            mine = scope["type"] == "http" and scope["path"] == "/mcp"
            await (tools if mine else gym)(scope, receive, send)

        listener = socket.create_server(("127.0.0.1", port))
        config = uvicorn.Config(app, log_level="warning", lifespan="auto", http="httptools", ws="websockets-sansio")
        print(listener.getsockname()[1], flush=True)
        await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    import anyio

    parser = argparse.ArgumentParser()
    parser.add_argument("--home")
    parser.add_argument("--port", type=int)
    parser.add_argument("--sessions", type=int)
    given = parser.parse_args()
    anyio.run(main, given.home, given.port, given.sessions)
