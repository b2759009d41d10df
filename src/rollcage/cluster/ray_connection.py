"""Finds a Ray cluster and connects this process to it; says within seconds where there is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio

from rollcage.errors import SetupError, UsageError
from rollcage.settings import give_default

NAMESPACE = "rollcage"
ANSWER_S = 5.0
"""How long Ray's head may take to answer at all. Ray itself would try for minutes."""
LOCAL = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""A Ray of our own finds out in three seconds that a node is dead, not in fifteen."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a gRPC client begins: the preface of HTTP/2, and settings without any."""
_OTHER = "its head has port 6379 unless told; one with tokens wants RAY_AUTH_MODE and RAY_AUTH_TOKEN as it has them"
_START = "start one with `ray start --head`, or say `local`"


@asynccontextmanager
async def connection(address: str) -> AsyncIterator[None]:
    """Connected to a cluster while the block lasts: `local` starts one here, `auto` finds the one that is here.

    A process that is connected already stays so, whatever it is connected to.
    """
    give_default("RAY_USAGE_STATS_ENABLED", "0")
    give_default("RAY_raylet_start_wait_time_s", "120")
    give_default("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address != "local":
        give_default("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds; what is no head of Ray's would be asked for twenty
    try:
        import ray
    except ImportError as error:
        raise SetupError("a cluster needs Ray", remedy="pip install 'rollcage[ray]'") from error
    if ray.is_initialized():
        yield
        return
    # One thread for all of its life: what Ray starts is killed by the kernel when the thread ends that started it.
    with ThreadPoolExecutor(1, "rollcage-ray") as thread:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(thread, _connect, address)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await loop.run_in_executor(thread, ray.shutdown)


def check_serve() -> None:
    """SetupError where Ray Serve cannot be asked from here."""
    try:
        import ray.serve  # noqa: F401 - what its controller says is made of it
    except ImportError as error:
        raise SetupError(f"Ray Serve needs more packages ({error.name})", remedy="pip install 'ray[serve]'") from error


def _connect(address: str) -> None:
    import ray
    from ray._private import utils

    # Signals are the command's: Ray would take SIGTERM, and cannot where another thread than the main starts it.
    utils.set_sigterm_handler = lambda handler: None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
    if address == "local":
        quiet |= {"include_dashboard": False, "_system_config": LOCAL}
    else:
        address = found_address(address)
        check_answers(address)
        check_node(address)
    try:
        ray.init(address=address, **quiet)
    except Exception as error:
        # Ray has the same words for another service of its own and for a token that is wrong.
        remedy = _OTHER if isinstance(error, ConnectionError) else ""
        raise SetupError(
            f"the Ray at {address} cannot be used: {' '.join(str(error).split())}", remedy=remedy
        ) from error


def found_address(address: str) -> str:
    """Host and port of a cluster's head, also for `auto`."""
    from ray._private.services import canonicalize_bootstrap_address

    if address.startswith("ray://"):
        remedy = "give that of Ray's head itself, host:6379, on a machine of the cluster"
        raise UsageError(f"{address!r} is of Ray Client, which cannot start nodes", argument="ray", remedy=remedy)
    try:
        found = canonicalize_bootstrap_address(address)
    except ConnectionError as error:
        raise SetupError("no Ray runs on this machine", remedy=_START) from error
    except OSError as error:
        raise SetupError(f"no Ray cluster answers at {address}: {error.strerror or error}", remedy=_START) from error
    except ValueError as error:
        raise UsageError(f"{address!r} is no address", argument="ray", remedy="it looks like head:6379") from error
    return str(found)


def check_answers(address: str) -> None:
    """SetupError unless somebody there speaks as Ray's head does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S) as there:
            there.settimeout(ANSWER_S)
            there.sendall(_GREETING)
            # Settings in return; or, of a Ray with TLS, that this was no TLS.
            said = there.recv(9, socket.MSG_WAITALL)
    except TimeoutError as error:
        raise SetupError(f"no Ray cluster answers at {address} within {ANSWER_S:g} s", remedy=_START) from error
    except OSError as error:
        raise SetupError(f"no Ray cluster answers at {address}: {error.strerror or error}", remedy=_START) from error
    if said[3:4] != b"\x04" and said[:1] != b"\x15":
        raise SetupError(f"what answers at {address} is no Ray", remedy="the port of Ray's head is 6379 unless told")


def check_node(address: str, processes: Path = Path("/proc")) -> None:
    """SetupError where no process of Ray's runs beside this one: Ray would look for it for a minute."""
    for each in processes.glob("[0-9]*/comm"):
        with suppress(OSError):
            if each.read_text() == "raylet\n":
                return
    remedy = f"make it one, without places for rollouts: ray start --address {address} --num-cpus 0"
    raise SetupError(f"this machine is no node of the Ray cluster at {address}", remedy=remedy)
