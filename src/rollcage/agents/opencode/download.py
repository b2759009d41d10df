"""Downloads one npm package as the registry publishes it: with npm where it is installed, else over HTTPS."""

from __future__ import annotations

import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from rollcage.errors import SetupError

_SILENCE_S = 60
"""A registry that sends nothing for so long is given up."""
_CHUNK = 1 << 20


async def download(name: str, version: str, folder: Path, registry: str) -> Path:
    """The package's archive, below `folder`. What is in it is for the caller to check.

    `registry`: its address, for machines without npm; npm knows its own.
    """
    npm = shutil.which("npm")
    if npm is not None:
        return await _with_npm(npm, f"{name}@{version}", folder)
    if not registry:
        raise SetupError(
            "npm is missing, and no registry is set to fetch OpenCode from without it; "
            "run: apt-get install npm - or set NPM_CONFIG_REGISTRY to your registry's address"
        )
    return await _without_npm(name, version, folder, registry)


async def _with_npm(npm: str, wanted: str, folder: Path) -> Path:
    command = [npm, "pack", "--silent", "--cache", f"{folder}/cache", wanted]
    done = await anyio.run_process(command, cwd=folder, check=False)
    archives = [path async for path in anyio.Path(folder).glob("*.tgz")]
    if done.returncode or not archives:
        said = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise SetupError(f"npm could not fetch {wanted}: {said}; check the network and run it again")
    return Path(archives[0])


async def _without_npm(name: str, version: str, folder: Path, registry: str) -> Path:
    parts = urlsplit(registry)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SetupError("the npm registry that is set is no http address; set NPM_CONFIG_REGISTRY to one")
    target = folder / f"{name}-{version}.tgz"
    try:
        async with _opened(f"{registry.rstrip('/')}/{name}/-/{target.name}") as answer:
            with target.open("wb") as file:
                while chunk := await anyio.to_thread.run_sync(answer.read, _CHUNK):
                    await anyio.to_thread.run_sync(file.write, chunk)
    except (OSError, http.client.HTTPException) as error:
        why = f"it answered {error.code}" if isinstance(error, urllib.error.HTTPError) else str(error)
        raise SetupError(
            f"could not fetch {name} {version} from {parts.hostname}: {why}; "
            "check the network, or install npm where the registry asks for a login"
        ) from error
    return target


@asynccontextmanager
async def _opened(address: str) -> AsyncIterator[http.client.HTTPResponse]:
    request = urllib.request.Request(address)  # noqa: S310 - the scheme was looked at
    answer = await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(request, timeout=_SILENCE_S))  # noqa: S310
    try:
        yield answer
    finally:
        answer.close()
