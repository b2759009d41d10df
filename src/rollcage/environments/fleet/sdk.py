"""The official Fleet SDK behind typed functions: the one module that touches it. Its errors become ours here.

Its own blind retries (it repeats a failed creation on 404 and 500 too) are switched off: what is repeated is decided in
`provision`, and only where the service calls it retryable.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

import anyio
import httpx
from pydantic import SecretStr

from rollcage.environments.fleet.errors import (
    BootFailed,
    BootTooSlow,
    FleetError,
    InstanceLost,
    KeyRefused,
    QuotaReached,
    UnknownEnvironment,
)
from rollcage.environments.fleet.types import EnvironmentInfo, Options
from rollcage.errors import needs_extra

TRIES = 5
"""How often a creation is asked for at most."""
LIST_S = 60.0
"""How long a list may take."""
POLL_S = 1.0
"""How often an instance that still boots is looked at."""


class Instance(Protocol):
    """What we use of the SDK's `AsyncEnv`."""

    instance_id: str
    env_key: str
    version: str
    status: str
    region: str
    heartbeat_interval: int | None
    urls: Any
    instance: Any

    async def heartbeat(self) -> Any: ...
    async def close(self) -> Any: ...


class Fleet(Protocol):
    """What we use of the SDK's `AsyncFleet`."""

    async def make(self, env_key: str, **options: Any) -> Instance: ...
    async def instance(self, instance_id: str) -> Instance: ...
    async def instances(self, status: str | None = None, run_id: str | None = None) -> list[Instance]: ...
    async def close(self, instance_id: str) -> Any: ...
    async def close_all(self, run_id: str | None = None) -> Any: ...
    async def list_envs(self) -> list[Any]: ...


def fleet(api_key: SecretStr, base_url: str, http: httpx.AsyncClient) -> Fleet:
    """A client of the control plane."""
    # The SDK is written for an older pydantic, which warns about it.
    with needs_extra("a Fleet environment", "fleet"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package, config = import_module("fleet"), import_module("fleet.config")
    key = api_key.get_secret_value().strip()
    if not key:
        remedy = "set FLEET_API_KEY, or try it without one: rollcage fleet demo"
        raise KeyRefused(f"there is no Fleet key; {remedy}")
    if not key.isascii() or not key.isprintable():
        raise KeyRefused("the Fleet key holds characters that no key has; check FLEET_API_KEY")
    # Both values are always given: the SDK would look into the environment for what is missing.
    address = (base_url or config.GLOBAL_BASE_URL).rstrip("/")
    made: Fleet = package.AsyncFleet(api_key=key, base_url=address, httpx_client=http)
    return made


async def environments(client: Fleet) -> list[EnvironmentInfo]:
    """What the service offers."""
    with boundary("list the environments"), _in_time():
        listed = await client.list_envs()
    return [
        EnvironmentInfo(
            key=one.env_key,
            name=one.name,
            description=one.description or "",
            default_version=one.default_version or "",
            versions=sorted(one.versions),
        )
        for one in listed
    ]


async def instances(client: Fleet) -> list[Instance]:
    """What runs or boots right now under this key."""
    with boundary("list the instances"), _in_time():
        listed = await client.instances()
    return [one for one in listed if one.status in ("pending", "running")]


async def provision(client: Fleet, env_key: str, options: Options, run_id: str, made: list[Instance]) -> Instance:
    """An instance that runs, within `boot_timeout_s`; creation is repeated only where the service says that helps.

    What was created is in `made` as soon as it is known, so that it can be released even if it never runs.
    """
    seconds = options.boot_timeout_s
    with anyio.move_on_after(seconds):
        instance = await _created(client, env_key, options, run_id)
        made.append(instance)
        while instance.status == "pending":
            await anyio.sleep(POLL_S)
            with boundary(f"look at instance {instance.instance_id}", env_key):
                instance = await client.instance(instance.instance_id)
        if instance.status != "running":
            message = f"{env_key}: instance {instance.instance_id} is {instance.status!r} instead of running"
            raise BootFailed(f"{message}; try again, or another version (KEY:VERSION)")
        return instance
    message = f"{env_key}: the instance did not run within {seconds:g} s and was given up"
    raise BootTooSlow(f"{message}; raise boot_timeout_s, or try again later")


async def _created(client: Fleet, env_key: str, options: Options, run_id: str) -> Instance:
    data_key = options.data_key
    if data_key and options.data_version and ":" not in data_key:
        data_key = f"{data_key}:{options.data_version}"
    # The service waits 30 s less than this for the boot and then answers; our own deadline is outside.
    timeout = options.boot_timeout_s + 60
    wait = options.retry_wait_s
    for tried in range(1, TRIES + 1):
        try:
            with boundary(f"provision {env_key}", env_key, creating=True):
                return await client.make(
                    env_key,
                    data_key=data_key,
                    region=options.region,
                    env_variables=options.env_variables,
                    image_type=options.image_type,
                    ttl_seconds=options.ttl_seconds,
                    run_id=run_id,
                    heartbeat_interval=options.heartbeat_interval,
                    timeout=timeout,
                    max_wait_seconds=options.service_wait_s,
                )
        except FleetError as error:
            if tried == TRIES or error.__cause__ is None or not retryable(error.__cause__):
                raise
        await anyio.sleep(wait)
        wait *= 2
    raise AssertionError("unreachable")


def retryable(error: BaseException) -> bool:
    """Whether the service itself says that asking again may help."""
    if "FleetInstanceLimitError" in _kinds(error):
        return False
    data = getattr(error, "response_data", None) or _body(error)
    for said in (data, data.get("detail") if isinstance(data, dict) else None):
        if isinstance(said, dict) and isinstance(said.get("retryable"), bool):
            return bool(said["retryable"])
    # The service has no field and no status of its own for this refusal, only these words.
    return getattr(error, "status_code", None) in (429, 503) or "too many in-flight" in str(error).lower()


def _body(error: BaseException) -> object:
    """What the service answered, where the SDK kept only its text."""
    try:
        return json.loads(str(error))
    except ValueError:
        return None


@contextmanager
def boundary(what: str, env_key: str = "", *, creating: bool = False) -> Iterator[None]:
    """The SDK's errors as ours, saying what to do. What is missing (404) is an instance, or what to create one from."""
    try:
        yield
    except FleetError:
        raise
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FleetError(f"cannot {what}: {_said(error)}; check the network and FLEET_BASE_URL") from error
    except Exception as error:
        if "FleetError" in _kinds(error):
            raise _ours(error, what, env_key, creating) from error
        if isinstance(error, ValueError | TypeError | LookupError | AttributeError | RecursionError):
            raise FleetError(f"cannot {what}: the service's answer was not understood ({_said(error)})") from error
        raise


@contextmanager
def _in_time() -> Iterator[None]:
    try:
        with anyio.fail_after(LIST_S):
            yield
    except TimeoutError as error:
        raise FleetError(f"no answer from the service within {LIST_S:g} s; try again later") from error


def _kinds(error: BaseException) -> set[str]:
    """What the SDK calls this error. It has every class twice, for its plain and its async half; the names agree."""
    return {kind.__name__ for kind in type(error).__mro__}


def _ours(error: Exception, what: str, env_key: str, creating: bool) -> FleetError:
    said, kinds = _said(error), _kinds(error)
    status = getattr(error, "status_code", None)
    limit = "end instances (rollcage fleet ls --instances shows them) or ask Fleet for a higher limit"
    shown = "rollcage fleet ls shows what there is"
    known: tuple[tuple[str, type[FleetError], str], ...] = (
        ("FleetAuthenticationError", KeyRefused, "Fleet does not take this key: check FLEET_API_KEY"),
        ("FleetInstanceLimitError", QuotaReached, limit),
        ("FleetEnvironmentNotFoundError", UnknownEnvironment, shown),
        ("FleetVersionNotFoundError", UnknownEnvironment, shown),
        ("FleetEnvironmentAccessError", UnknownEnvironment, f"ask Fleet for access to {env_key}"),
        ("FleetPermissionError", KeyRefused, "this key may not: use another, or ask Fleet"),
        ("FleetRateLimitError", FleetError, "too many requests: wait a little and try again"),
        ("FleetTimeoutError", BootTooSlow, "no answer in time: try again later"),
    )
    for name, kind, remedy in known:
        if name in kinds:
            return kind(f"cannot {what}: {said}; {remedy}")
    if status == 404 and creating:
        return UnknownEnvironment(f"cannot {what}: {said}; {shown}")
    if status == 404:
        return InstanceLost(f"cannot {what}: {said}; it ended or never was: provision another")
    if status is None:
        return FleetError(f"cannot {what}: {said}; check the network and FLEET_BASE_URL")
    return FleetError(f"cannot {what}: HTTP {status}, {said}; if it stays so, ask Fleet")


def _said(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:500] or type(error).__name__
