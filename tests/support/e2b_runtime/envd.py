"""What runs in each machine of the small E2B: its process service, and the upload and download of files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof

from support.e2b_runtime.machines import Command, Machine

Find = Callable[[str], Machine]
"""The machine of this id; ConnectError where it is gone."""
_MOST = 64 << 20


class ProcessService(Process):
    """envd's process service, for all machines: each request says which one it means."""

    def __init__(self, find: Find) -> None:
        self._find = find

    async def start(
        self, request: pb.StartRequest, ctx: RequestContext[Any, Any], /
    ) -> AsyncIterator[pb.StartResponse]:
        """Start a command and tell what becomes of it."""
        config = request.process or pb.ProcessConfig()
        machine = self._machine(ctx)
        command = await machine.start([config.cmd, *config.args], dict(config.envs), config.cwd)
        refused = await command.started
        if refused:
            raise ConnectError(Code.INVALID_ARGUMENT, refused)
        if not request.stdin and command.stdin is not None:
            await command.stdin.aclose()
        yield _event(Oneof("start", pb.ProcessEvent.StartEvent(pid=command.pid)))
        async for name, value in command.events():
            if name == "end":
                code = int(value)
                ended = pb.ProcessEvent.EndEvent(exit_code=code, exited=code >= 0, status=f"exit status {code}")
                yield _event(Oneof("end", ended))
                return
            yield _event(Oneof("data", pb.ProcessEvent.DataEvent(output=Oneof(name, value))))  # type: ignore[arg-type]
        raise ConnectError(Code.UNAVAILABLE, "the connection to the sandbox ended before the stream completed")

    async def send_input(self, request: pb.SendInputRequest, ctx: RequestContext[Any, Any], /) -> pb.SendInputResponse:
        """Write to a command's input; answered when its pipe has taken all of it."""
        command = self._command(ctx, request.process)
        given = request.input.input if request.input is not None else None
        if command.stdin is None or given is None:
            raise ConnectError(Code.INVALID_ARGUMENT, "no input")
        try:
            await command.stdin.send(given.value)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise ConnectError(Code.INTERNAL, "error writing to stdin: file already closed") from error
        return pb.SendInputResponse()

    async def close_stdin(
        self, request: pb.CloseStdinRequest, ctx: RequestContext[Any, Any], /
    ) -> pb.CloseStdinResponse:
        """End a command's input."""
        command = self._command(ctx, request.process)
        if command.stdin is not None:
            await command.stdin.aclose()
        return pb.CloseStdinResponse()

    async def send_signal(
        self, request: pb.SendSignalRequest, ctx: RequestContext[Any, Any], /
    ) -> pb.SendSignalResponse:
        """Kill a command."""
        self._command(ctx, request.process).kill()
        return pb.SendSignalResponse()

    def _machine(self, ctx: RequestContext[Any, Any]) -> Machine:
        return self._find(ctx.request_headers.get("e2b-sandbox-id") or "")

    def _command(self, ctx: RequestContext[Any, Any], selector: pb.ProcessSelector | None) -> Command:
        chosen = selector.selector if selector is not None else None
        pid = chosen.value if chosen is not None and chosen.field == "pid" else -1
        command = self._machine(ctx).command(int(pid))
        if command is None:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {pid} not found")
        return command


def process_application(find: Find) -> ProcessASGIApplication:
    """The process service as an application."""
    return ProcessASGIApplication(ProcessService(find), read_max_bytes=_MOST)


def _event(event: Any) -> pb.StartResponse:
    return pb.StartResponse(event=pb.ProcessEvent(event=event))
