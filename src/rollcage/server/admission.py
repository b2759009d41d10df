"""Who may ask: keys, the names behind them, and what each may use and see."""

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

from pydantic import Field, ValidationError

from rollcage._places import Share
from rollcage.api.errors import Unauthorized
from rollcage.errors import UsageError
from rollcage.types import Value

SCOPE = "rollcage.caller"
"""Where the middleware leaves the caller in the ASGI scope."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Caller(Value):
    """Who asks: the name of a key, and what it may do."""

    name: str = ""
    """The key's name; empty where the server has no keys."""
    admin: bool = False
    """Sees and stops everybody's rollouts; others see their own only."""
    at_once: int | None = Field(default=None, ge=1)
    """How many of its rollouts may run at once; null: as many as the server runs."""
    queue: int | None = Field(default=None, ge=0)
    """How many of its rollouts may wait; null: as many as places in the queue are left for others."""
    alone: bool = False
    """Whether its key is the only one, so that nothing has to be left for others."""

    @property
    def share(self) -> Share:
        """How much of the places it may take."""
        return Share(self.name, self.at_once, self.queue, alone=self.alone)


ANYONE = Caller(admin=True, alone=True)
"""The caller where the server has no keys: the user of this machine, who sees everything."""

NOBODY = Caller(name="-")
"""The caller who showed no key where there are some, at an address that needs none: it owns and sees nothing."""

current_caller: ContextVar[Caller] = ContextVar("current_caller", default=ANYONE)
"""The caller of the request that is being answered."""


class Limits(Value):
    """How much a server takes on."""

    at_once: int = Field(default=8, ge=1)
    """Rollouts that run at the same time."""
    queue: int = Field(default=256, ge=0)
    """Rollouts that may wait; the next one is refused."""
    allow_endpoints: tuple[str, ...] = ()
    """Model addresses that callers may name (`https://host[:port][/path]`); none means any."""


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
            raise UsageError(f"--api-key-file: {path} has no keys; make one with `rollcage serve --new-key NAME`")
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
        raise UsageError(f"--new-key: {name!r} is no name; use letters, digits, and _ . - between them")
    if path.exists() and name in _read(path):
        raise UsageError(
            f"--new-key: {path} has a key named {name!r} already; choose another name, or take it out there"
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
