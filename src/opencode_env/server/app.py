"""The server under its published name: `uvicorn opencode_env.server.app:app`, or `python -m opencode_env.server.app`.

Both serve what `rollcage serve` serves. Under uvicorn's own command the key comes from `ROLLCAGE_SERVER_KEY`; without
one, only requests to localhost are answered.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack

from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY = 32 << 20
"""Largest request."""


class Served:
    """The whole server as one ASGI app, opened and closed by the lifespan protocol."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Speak ASGI."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is None:
            raise RuntimeError("this app needs the ASGI lifespan protocol: run it with uvicorn's --lifespan on")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with AsyncExitStack() as stack:
            try:
                self._app = await _opened(stack)
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                raise
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self._app = None
        await send({"type": "lifespan.shutdown.complete"})


async def _opened(stack: AsyncExitStack) -> ASGIApp:
    from rollcage.server.app import App, gated
    from rollcage.server.auth import load_keys
    from rollcage.server.service import Service
    from rollcage.settings import Settings

    settings = Settings.from_environ()
    keys = load_keys(None, one=settings.server_key.get_secret_value())
    service = await stack.enter_async_context(Service.open(settings, callers=keys.callers()))
    app = App(service, keyed=bool(keys))
    await stack.enter_async_context(app.parts())
    return gated(app, service, keys=keys, only_loopback=not keys, max_body=MAX_BODY)


app = Served()


def main() -> None:
    """The same as `rollcage serve`, with its options."""
    from rollcage.cli import main as rollcage

    sys.argv[:] = ["rollcage", "serve", *sys.argv[1:]]
    rollcage()


if __name__ == "__main__":
    main()
