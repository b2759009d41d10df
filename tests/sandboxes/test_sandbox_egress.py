"""The door out of a box opens for the names on the list, and closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.egress import _is_public, _Proxy, egress
from support.boxes import a_box, python

FETCH = """
import os, socket, sys
method, target = sys.argv[1:]
s = socket.create_connection(('127.0.0.1', 7003)); s.settimeout(100)
head = f'{method} {target} HTTP/1.1\\r\\nHost: x\\r\\nProxy-Authorization: secret\\r\\nX-Mine: 1\\r\\n\\r\\n'
s.sendall(head.encode())
if method == 'CONNECT':
    first = s.recv(1000); print(first.split(b'\\r\\n')[0].decode())
    if b' 200 ' not in first: print(first.decode()); sys.exit()
    s.sendall(b'GET /tunnel HTTP/1.1\\r\\n\\r\\n')
data = b''
while chunk := s.recv(1000): data += chunk
print(data.decode())
"""


@asynccontextmanager
async def _site() -> AsyncIterator[int]:
    """A web site on the host's loopback that tells what it was asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_listed_hosts_are_reached_and_all_others_refused(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box, _site() as port:
        await box.write("/home/user/fetch.py", FETCH.encode())
        async with egress(box, ["127.0.0.1", "*.example.com"]) as environment:
            assert environment["HTTPS_PROXY"] == environment["http_proxy"] == "http://127.0.0.1:7003"
            got = (await sh(box, f"python3 fetch.py GET 'http://127.0.0.1:{port}/a/b?c=d'")).stdout.text
            assert f"GET /a/b?c=d HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-Mine: 1\r\n" in got and "secret" not in got
            got = (await sh(box, f"python3 fetch.py CONNECT 127.0.0.1:{port}")).stdout.text
            assert got.startswith("HTTP/1.1 200") and "GET /tunnel" in got
            for target, status in (
                (f"127.0.0.2:{port}", "403"),
                ("example.com:443", "403"),
                ("evilexample.com:443", "403"),
                ("no port at all", "400"),
                (":443", "400"),
            ):
                got = (await sh(box, f"python3 fetch.py CONNECT '{target}'")).stdout.text
                assert got.startswith(f"HTTP/1.1 {status}"), (target, got)
            got = (await sh(box, "python3 fetch.py GET https://127.0.0.1/")).stdout.text
            assert got.startswith("HTTP/1.1 400")


async def test_a_name_that_leads_to_a_private_address_is_reached_if_that_address_is_listed_too(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box, _site() as port:
        await box.write("/home/user/fetch.py", FETCH.encode())
        for hosts, status in ((["localhost"], "403"), (["localhost", "127.0.0.1", "::1"], "200")):
            async with egress(box, hosts):
                got = (await sh(box, f"python3 fetch.py CONNECT localhost:{port}")).stdout.text
                assert got.startswith(f"HTTP/1.1 {status}"), (hosts, got)
                assert "127.0.0.1" not in got and "::1" not in got, "which address it is, the box does not learn"


async def test_nothing_is_reachable_after_the_block(tmp_path: Path) -> None:
    hold = (
        "import socket,sys\ns=socket.create_connection(('127.0.0.1',7003))\n"
        "s.sendall(b'CONNECT 127.0.0.1:%d HTTP/1.1\\r\\n\\r\\n')\nprint(s.recv(99)[9:12].decode(),flush=True)\n"
        "try: print(s.recv(99))\nexcept OSError as e: print(e.errno)\n"
    )
    async with a_box(tmp_path) as box:
        cut = asyncio.Event()

        async def stay_quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                await reader.read()
            writer.close()
            cut.set()

        quiet = await asyncio.start_server(stay_quiet, "127.0.0.1", 0)
        port = quiet.sockets[0].getsockname()[1]
        async with egress(box, ["127.0.0.1"]):
            holding = box.spawn(["python3", "-I", "-c", hold % port])
            process = await holding.__aenter__()
            assert await process.stdout.receive() == b"200\n"
        assert await process.stdout.receive() in (b"b''\n", b"104\n")
        await holding.__aexit__(None, None, None)
        await cut.wait()
        quiet.close()
        await quiet.wait_closed()
        ran = await python(box, "import socket;socket.create_connection(('127.0.0.1',7003))")
        assert "refused" in ran.stderr.text


async def test_the_list_must_name_hosts(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        for host in ("*", "", "http://example.com/"):
            with pytest.raises(UsageError):
                async with egress(box, [host]):
                    pass


def test_names_match_exactly_or_by_suffix() -> None:
    proxy = _Proxy(frozenset(["index.example", "*.files.example"]))
    allowed = ["index.example", "files.files.example", "a.b.files.example"]
    refused = ["x.index.example", "files.example", "evilfiles.example", ".files.example", "index.example.evil.com"]
    assert [proxy._allows(host) for host in allowed] == [True] * 3
    assert [proxy._allows(host) for host in refused] == [False] * 5


def test_private_addresses_are_known_in_every_disguise() -> None:
    private = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "0.0.0.0", "224.0.0.1", "100.64.0.1", "::1"]
    private += ["fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "ff02::1"]
    assert [address for address in private if _is_public(address)] == []
    assert _is_public("1.1.1.1") and _is_public("2606:4700:4700::1111")
