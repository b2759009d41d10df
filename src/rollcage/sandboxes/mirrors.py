"""Network for setup commands: the hosts a task names and, by the short name `packages`, the package indexes that this
machine is configured with. Their addresses are asked of pip, npm and apt; no address of an index stands here."""

from __future__ import annotations

import ast
import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import anyio

from rollcage.errors import SetupError
from rollcage.sandboxes.base import PATH, Imaged, Sandbox, run
from rollcage.sandboxes.egress import Refusal, egress, tell_nobody
from rollcage.types import HOME, Value

PACKAGES = "packages"
"""Stands among host names for the package indexes of this machine."""

_TRUSTED = f"{HOME}/.rollcage-mirrors.crt"
"""In the box, while its commands run. Not in /tmp: verify commands have one of their own."""
READ_BY = (
    *("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"),
    *("NODE_EXTRA_CA_CERTS", "npm_config_cafile"),
)
"""Variables by which installers find the certificates they trust: an index may be a mirror with one of its own."""
_DEFAULT_INDEX = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
_TIMEOUT_S = 60


OFFLINE = {
    "UV_OFFLINE": "1",
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "/opt/rollcage/wheels",
    "npm_config_offline": "true",
}
"""What images say whose installers were warmed: installers look at what is there, and wait for no network."""
_ONLINE = {"UV_OFFLINE": "0", "PIP_NO_INDEX": "0", "npm_config_offline": "false"}
"""What commands of theirs get that have a network all the same."""


class Mirrors(Value):
    """The package indexes of this machine."""

    hosts: tuple[str, ...] = ()
    """Where they are, and where what they list is."""
    env: dict[str, str] = {}
    """Leads installers in a box to them. No credentials: what an index wants of those, a box cannot have."""
    certificates: bytes = b""
    """What this machine trusts."""


@asynccontextmanager
async def setup_network(
    box: Sandbox, hosts: Sequence[str], refused: Refusal = tell_nobody
) -> AsyncIterator[dict[str, str]]:
    """Let setup commands reach these hosts, and no others, for the length of the block; gives their environment."""
    warmed = isinstance(box, Imaged) and OFFLINE.items() <= box.image_env.items()
    online = _ONLINE if warmed and hosts else {}
    if PACKAGES not in hosts:
        async with egress(box, hosts, refused=refused) as env:
            yield {**env, **online}
        return
    found = await mirrors()
    others = [host for host in hosts if host != PACKAGES]
    async with egress(box, others, trusted=found.hosts, refused=refused) as env:
        if found.certificates:
            await box.write(_TRUSTED, found.certificates)
            env = {**env, **dict.fromkeys(READ_BY, _TRUSTED)}
        try:
            yield {**env, **online, **found.env}
        finally:
            with anyio.CancelScope(shield=True):
                await run(box, ["rm", "-f", "--", _TRUSTED], env={"PATH": PATH}, inherit_image_env=False)


_known: list[Mirrors] = []


async def mirrors() -> Mirrors:
    """The package indexes that this machine is configured with; asked once."""
    if not _known:
        found: list[Mirrors] = []

        async def note(ask: Callable[[], Awaitable[Mirrors]]) -> None:
            found.append(await ask())

        async with anyio.create_task_group() as group:
            for ask in (_pip, _npm, _apt):
                group.start_soon(note, ask)
        hosts = tuple(sorted({host for each in found for host in each.hosts}))
        if not hosts:
            what = "neither pip, npm nor apt of this machine names a package index"
            raise SetupError(what, remedy="name hosts instead: {setup_hosts}")
        env = {name: value for each in found for name, value in each.env.items()}
        _known.append(Mirrors(hosts=hosts, env=env, certificates=_certificates()))
    return _known[0]


async def _pip() -> Mirrors:
    for python in dict.fromkeys((sys.executable, shutil.which("python3"), shutil.which("python"))):
        if not python or not (listed := await _said(python, "-m", "pip", "config", "list")):
            continue
        settings = dict(line.partition("=")[::2] for line in listed.splitlines())
        index, more = _setting(settings, "index-url"), _setting(settings, "extra-index-url").split()
        default = "" if index else (await _said(python, "-c", _DEFAULT_INDEX)).strip()
        report = await _said(
            *(python, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps"),
            *("--report", "-", "pip"),
        )
        further = [address for address in more if address.startswith(("http://", "https://"))]
        env = {"PIP_INDEX_URL": _bare(index)} if index else {}
        if further:
            env["PIP_EXTRA_INDEX_URL"] = " ".join(map(_bare, further))
        if trusted := _setting(settings, "trusted-host"):
            env["PIP_TRUSTED_HOST"] = trusted
        return Mirrors(hosts=_hosts(index or default, *further, _archive(report)), env=env)
    return Mirrors()


async def _npm() -> Mirrors:
    if not (npm := shutil.which("npm")):
        return Mirrors()
    registry = (await _said(npm, "config", "get", "registry")).strip()
    archive = (await _said(npm, "view", "npm", "dist.tarball")).strip()
    return Mirrors(hosts=_hosts(registry, archive), env={"npm_config_registry": _bare(registry)} if registry else {})


async def _apt() -> Mirrors:
    if not (apt := shutil.which("apt-get")):
        return Mirrors()
    return Mirrors(hosts=_hosts(*(await _said(apt, "indextargets", "--format", "$(REPO_URI)")).split()))


async def _said(*command: str) -> str:
    """What a command printed; nothing where it failed, or took too long."""
    with anyio.move_on_after(_TIMEOUT_S):
        ended = await anyio.run_process(command, check=False, stderr=subprocess.DEVNULL)
        return ended.stdout.decode("utf-8", "replace") if ended.returncode == 0 else ""
    return ""


def _setting(settings: dict[str, str], name: str) -> str:
    """A setting of pip's, by whoever says it last: variables over files, its own section over the global one."""
    for section in (":env:", "install", "user", "site", "global"):
        if value := settings.get(f"{section}.{name}"):
            return str(ast.literal_eval(value))
    return ""


def _archive(report: str) -> str:
    """The address of what pip would have installed; indexes name files of other hosts."""
    try:
        return str(json.loads(report)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError, TypeError):
        return ""


def _hosts(*addresses: str) -> tuple[str, ...]:
    return tuple(host for address in addresses if (host := urlsplit(address).hostname))


def _bare(address: str) -> str:
    """The address without a user and password."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _certificates() -> bytes:
    paths = ssl.get_default_verify_paths()
    try:
        return Path(paths.cafile).read_bytes() if paths.cafile else b""
    except OSError:
        return b""
