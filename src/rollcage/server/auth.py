"""Who may ask: keys, the names behind them, what each may use and see, and whom the server answers without one."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from rollcage.errors import UsageError
from rollcage.runner.queue import Quota
from rollcage.schema.errors import Unauthorized
from rollcage.types import Value

SCOPE = "rollcage.caller"
"""Where the middleware leaves the caller in the ASGI scope."""
OPEN = re.compile(r"^/(health|ready|docs|openapi\.json|web(/.*)?)?$")
"""What needs no key: it says nothing about anybody's rollouts."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Caller(Value):
    """Who asks: the name of a key, and what it may do."""

    name: str = ""
    """The key's name; empty where the server has no keys."""
    admin: bool = False
    """Sees and stops everybody's rollouts; others see their own only."""
    at_once: int | None = Field(default=None, ge=1)
    """How many of its rollouts may run at once; None: as many as the server runs."""
    queue: int | None = Field(default=None, ge=0)
    """How many of its rollouts may wait; None: as many as places in the queue are left for others."""
    alone: bool = False
    """Whether its key is the only one, so that nothing has to be left for others."""

    @property
    def quota(self) -> Quota:
        """How much of the queue and of the slots it may take."""
        return Quota(self.name, self.at_once, self.queue, alone=self.alone)


ANYONE = Caller(admin=True, alone=True)
"""The caller where the server has no keys: the user of this machine, who sees everything."""

NOBODY = Caller(name="-")
"""The caller who showed no key where there are some, at an address that needs none: it owns and sees nothing."""

current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYONE)
"""The caller of the request that is being answered."""


class Key(Value):
    """One key in a key file; the file has its hash, never the key itself."""

    sha256: str = Field(pattern=r"^[0-9a-fA-F]{64}$")
    """SHA-256 of the key, in hex."""
    admin: bool = False
    """Sees and stops everybody's rollouts."""
    at_once: int | None = Field(default=None, ge=1)
    """How many of its rollouts may run at once."""
    queue: int | None = Field(default=None, ge=0)
    """How many of its rollouts may wait; left out: as many as places in the queue are left for others."""


class Keys:
    """The keys of a server; none of them means that everybody on this machine may ask."""

    def __init__(self, keys: Mapping[str, Key] | None = None) -> None:
        keys = keys or {}
        self._known = [
            (bytes.fromhex(key.sha256), Caller(name=name, alone=len(keys) == 1, **key.model_dump(exclude={"sha256"})))
            for name, key in keys.items()
        ]

    def __bool__(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._known)

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller:
        """Who sent these headers: `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
        if not self._known:
            return ANYONE
        digest = hashlib.sha256(_shown(headers)).digest()
        # All of them, always: how long it takes tells nothing.
        found = [caller for known, caller in self._known if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthorized("this server wants a key: send it as `Authorization: Bearer KEY`")
        return found[0]

    def callers(self) -> dict[str, Caller]:
        """Every caller by its name."""
        return {caller.name: caller for _, caller in self._known}


def _shown(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name.lower() == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name.lower() == b"x-api-key":
            return value.strip()
    return b""


class Forbidden(Exception):
    """A request that no key would help: it comes from a web page of another site, or under another name."""


def admitted(scope: Mapping[str, Any], keys: Keys, *, only_loopback: bool) -> Caller:
    """Who sent an ASGI request; Forbidden or Unauthorized where it may not be answered."""
    if not keys:
        _check_origin(scope["headers"], only_loopback)
    try:
        return keys.caller(scope["headers"])
    except Unauthorized:
        if scope["type"] == "http" and OPEN.fullmatch(scope["path"]):
            return NOBODY
        raise


def _check_origin(raw: Sequence[tuple[bytes, bytes]], only_loopback: bool) -> None:
    """Without keys, a web page of another site could speak for this machine's user; here it cannot."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(raw)}
    host = headers.get("host", "")
    if only_loopback and not loopback(_part(f"//{host}", "hostname")):
        raise Forbidden("this server answers to localhost only; start it with keys to use other names")
    origin = headers.get("origin")
    # Browsers name no origin with a GET whose answer its page cannot read; it would be served all the same.
    elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    looks_in = elsewhere and headers.get("sec-fetch-mode") != "navigate"
    if looks_in or (origin is not None and _part(origin, "netloc").lower() != host.lower()):
        raise Forbidden("web pages of other sites may not use this server")


def _part(url: str, name: str) -> str:
    try:
        return getattr(urlsplit(url), name) or ""
    except ValueError:
        return ""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """The caller of an ASGI request, as the middleware found it."""
    caller = scope.get(SCOPE)
    return caller if isinstance(caller, Caller) else current_caller.get()


def load_keys(path: Path | None, *, one: str = "") -> Keys:
    """The keys of a TOML file (`[keys.NAME]` with `sha256`, and perhaps `admin`, `at_once`, `queue`).

    `one`: a further key, as it is, that may see everything: from the environment.
    """
    keys: dict[str, Key] = {}
    if path is not None:
        keys = _read(path)
        if not keys:
            raise UsageError(
                f"--api-key-file: {path} has no keys", remedy="make one with `rollcage serve --new-key NAME`"
            )
    if one:
        keys["environment"] = Key(sha256=digest_of(one), admin=True)
    return Keys(keys)


def _read(path: Path) -> dict[str, Key]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--api-key-file: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--api-key-file: {path} is not TOML: {error}") from error
    try:
        return _File.model_validate(document).keys
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise UsageError(f"--api-key-file: {path}: {where}: {problem['msg']}") from None


class _File(Value):
    keys: dict[str, Key] = {}


def digest_of(key: str) -> str:
    """What a key file keeps of a key."""
    return hashlib.sha256(key.strip().encode()).hexdigest()


def new_key(path: Path, name: str, *, admin: bool = False) -> str:
    """Make a key, add its hash to the file, and return it: the only time anybody sees it."""
    if not re.match(NAME, name):
        raise UsageError(f"--new-key: {name!r} is no name", remedy="use letters, digits, and _ . - between them")
    if path.exists() and name in _read(path):
        raise UsageError(
            f"--new-key: {path} has a key named {name!r} already", remedy="choose another name, or take it out there"
        )
    key = f"rc-{secrets.token_urlsafe(32)}"
    lines = [f'[keys."{name}"]', f'sha256 = "{digest_of(key)}"', *(["admin = true"] if admin else [])]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        file.write("\n" * (file.tell() > 0) + "\n".join(lines) + "\n")
    return key


def loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
