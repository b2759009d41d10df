"""Runs the start-up and shut-down of an ASGI app that is part of another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.types import ASGIApp, Message

from rollcage.errors import SetupError


@asynccontextmanager
async def started(app: ASGIApp) -> AsyncIterator[None]:
    """The app, started, until the end of the block. One that knows no lifespan needs none."""
    to_app, from_us = anyio.create_memory_object_stream[Message](2)
    answers, from_app = anyio.create_memory_object_stream[Message](2)

    async def speak() -> None:
        async with answers:
            try:
                await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, from_us.receive, answers.send)
            except Exception as error:  # noqa: BLE001 - an app that knows no lifespan says so in whatever way it likes
                with anyio.move_on_after(1):
                    await answers.send({"type": "lifespan.unknown", "message": str(error)})

    async def ask(kind: str) -> str:
        with to_app.clone() as stream:
            await stream.send({"type": kind})
        try:
            answer = await from_app.receive()
        except anyio.EndOfStream:
            return ""
        if answer["type"] == f"{kind}.failed":
            raise SetupError(f"a part of the server did not start: {answer.get('message', '')}")
        return str(answer["type"])

    async with anyio.create_task_group() as tasks, to_app, from_us, from_app:
        tasks.start_soon(speak)
        running = await ask("lifespan.startup") == "lifespan.startup.complete"
        try:
            yield
        finally:
            if running:
                with anyio.move_on_after(5, shield=True):
                    await ask("lifespan.shutdown")
            tasks.cancel_scope.cancel()
