"""Downloads npm packages as the registry publishes them: with npm where it is installed, else over HTTPS."""

from __future__ import annotations

import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from rollcage.errors import SetupError

_SILENCE_S = 60
"""A registry that sends nothing for so long is given up."""
_CHUNK = 1 << 20


async def download(wanted: Sequence[tuple[str, str]], folder: Path, registry: str) -> None:
    """The archives of packages (names and versions), below `folder`, each called `archive_name`.

    What is in them is for the caller to check. `registry`: its address, for machines without npm; npm knows its own.
    """
    npm = shutil.which("npm")
    if npm is not None:
        await _with_npm(npm, [f"{name}@{version}" for name, version in wanted], folder)
        return
    if not registry:
        raise SetupError(
            f"npm is missing, and no registry is set to fetch {wanted[0][0]} from without it",
            remedy="run: apt-get install npm - or set NPM_CONFIG_REGISTRY to your registry's address",
        )
    for name, version in wanted:
        await _without_npm(name, version, folder, registry)


def archive_name(name: str, version: str) -> str:
    """What the archive of a package is called: without the slash that a name may have."""
    return f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"


async def _with_npm(npm: str, wanted: Sequence[str], folder: Path) -> None:
    command = [npm, "pack", "--silent", "--cache", f"{folder}/cache", *wanted]
    done = await anyio.run_process(command, cwd=folder, check=False)
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        shown = wanted[0] if len(wanted) == 1 else f"{wanted[0]} and {len(wanted) - 1} more"
        raise SetupError(f"npm could not fetch {shown}: {said}", remedy="check the network and run it again")


async def _without_npm(name: str, version: str, folder: Path, registry: str) -> None:
    parts = urlsplit(registry)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SetupError("the npm registry that is set is no http address", remedy="set NPM_CONFIG_REGISTRY to one")
    address = f"{registry.rstrip('/')}/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
    try:
        async with _opened(address) as answer:
            with (folder / archive_name(name, version)).open("wb") as file:
                while chunk := await anyio.to_thread.run_sync(answer.read, _CHUNK):
                    await anyio.to_thread.run_sync(file.write, chunk)
    except (OSError, http.client.HTTPException) as error:
        why = f"it answered {error.code}" if isinstance(error, urllib.error.HTTPError) else str(error)
        raise SetupError(
            f"could not fetch {name} {version} from {parts.hostname}: {why}",
            remedy="check the network, or install npm where the registry asks for a login",
        ) from error


@asynccontextmanager
async def _opened(address: str) -> AsyncIterator[http.client.HTTPResponse]:
    request = urllib.request.Request(address)  # noqa: S310 - the scheme was looked at
    answer = await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(request, timeout=_SILENCE_S))  # noqa: S310
    try:
        yield answer
    finally:
        answer.close()
