"""Behind a company's proxy: models are reached through it, and what NO_PROXY names is not."""

from __future__ import annotations

import asyncio
import base64
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rollcage.errors import ModelUnreachable
from rollcage.gateway import Gateway
from rollcage.gateway.http_out import Target, Upstream
from rollcage.gateway.proxies import proxy_to
from rollcage.settings import Settings
from rollcage.types import Endpoint, Proxies


@asynccontextmanager
async def serving(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A model that answers every request so."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        while True:
            try:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.IncompleteReadError:
                break
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
        await closed(writer)

    tasks: list[asyncio.Task[None] | None] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1], heads
        await asyncio.gather(*filter(None, tasks))


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


@asynccontextmanager
async def proxying(upstream: int, status: bytes = b"200 OK") -> AsyncIterator[tuple[int, list[bytes]]]:
    """A proxy that leads everybody to one port of this machine, whatever name they ask for."""
    heads: list[bytes] = []

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        await closed(sink)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        heads.append(head := await reader.readuntil(b"\r\n\r\n"))
        if head.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 %b\r\n\r\n" % status)
            if status != b"200 OK":
                await closed(writer)
                return
        to_model, from_us = await asyncio.open_connection("127.0.0.1", upstream)
        if not head.startswith(b"CONNECT"):
            from_us.write(head)
        await asyncio.gather(pump(reader, from_us), pump(to_model, writer), return_exceptions=True)

    tasks: list[asyncio.Task[None] | None] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], heads
        await asyncio.gather(*filter(None, tasks))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    key = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=model.test"]
    key += ["-addext", "subjectAltName=DNS:model.test", "-keyout", str(path), "-out", str(path) + ".crt"]
    subprocess.run(key, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


async def asked(upstream: Upstream, url: str) -> bytes:
    target = Target.of(url, "/models")
    connection = await upstream.open(target, target.head("GET", {}, None), b"")
    pieces: list[bytes] = []
    await connection.body(pieces.append)
    connection.release()
    return b"".join(pieces)


async def test_a_model_that_speaks_tls_is_reached_through_a_tunnel(certificate: Path) -> None:
    theirs, ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    theirs.load_cert_chain(certificate)
    ours.load_verify_locations(f"{certificate}.crt")
    async with serving(b"hello", theirs) as (model, requests), proxying(model) as (port, heads):
        upstream = Upstream(ours, proxies=Proxies(https=f"http://me:pa%20ss@127.0.0.1:{port}"))
        assert await asked(upstream, "https://model.test/v1") == b"hello"
        assert await asked(upstream, "https://model.test/v1") == b"hello"
        await upstream.close()
    assert len(heads) == 1, "the second request uses the same tunnel"
    assert heads[0].startswith(b"CONNECT model.test:443 HTTP/1.1\r\nHost: model.test:443\r\n")
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"me:pa ss") in heads[0]
    assert requests[0].startswith(b"GET /v1/models HTTP/1.1")
    assert b"Proxy-Authorization" not in requests[0]


async def test_a_model_without_tls_is_asked_for_by_its_whole_address() -> None:
    async with serving(b"hello") as (model, _), proxying(model) as (port, heads):
        upstream = Upstream(proxies=Proxies(http=f"127.0.0.1:{port}"))
        assert await asked(upstream, "http://model.test:8000/v1") == b"hello"
        await upstream.close()
    assert heads[0].startswith(b"GET http://model.test:8000/v1/models HTTP/1.1\r\nHost: model.test:8000\r\n")


async def test_a_proxy_that_refuses_is_named() -> None:
    async with (
        proxying(9, b"407 Proxy Authentication Required") as (port, _),
        Gateway.open(proxies=Proxies(https=f"http://127.0.0.1:{port}")) as gateway,
    ):
        with pytest.raises(ModelUnreachable, match=r"the proxy 127\.0\.0\.1:\d+ refused .* 407 Proxy Authentication"):
            await gateway.check(Endpoint(base_url="https://model.test/v1", model="m"))


@pytest.mark.parametrize(
    ("host", "port", "reached"),
    [
        ("api.model.test", 443, "p"),
        ("corp.test", 443, ""),
        ("a.b.corp.test", 443, ""),
        ("notcorp.test", 443, "p"),
        ("only.test", 8443, ""),
        ("only.test", 443, "p"),
        ("10.1.2.3", 443, ""),
        ("11.1.2.3", 443, "p"),
        ("localhost", 443, ""),
        ("127.0.0.1", 443, ""),
    ],
)
def test_what_no_proxy_names_is_reached_directly(host: str, port: int, reached: str) -> None:
    environ = {"HOME": "/h", "https_proxy": "p", "NO_PROXY": ".corp.test, only.test:8443,10.0.0.0/8"}
    proxies = Settings.from_environ(environ).proxies
    assert proxy_to(proxies, (True, host, port)) == reached
    assert proxy_to(proxies, (False, host, port)) == ""
    assert proxy_to(proxies.model_copy(update={"none_for": ("*",)}), (True, host, port)) == ""
