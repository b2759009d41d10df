"""E2B's cloud as far as we need it: boxes ordered, renewed, found again and given back. The only user of its SDK.

What the SDK raises becomes our errors here: SandboxLost where the box is gone, SetupError where the account is wrong.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollcage.errors import SandboxError, SandboxLost, SetupError, UsageError
from rollcage.settings import E2BSettings

if TYPE_CHECKING:
    from e2b import AsyncSandbox

REQUEST_TIMEOUT_S = 30.0
"""How long one request to the cloud may take."""
CREATE_ATTEMPTS = 6
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 15.0
_PAGE = 100
_KILL_ATTEMPTS = 3


class BoxGone(SandboxLost):
    """The cloud says that there is no such box: it will not come back."""


@dataclass(frozen=True)
class BoxOrder:
    """What kind of box to order."""

    template: str
    """Name of a template; empty: E2B's own."""
    ttl_s: int
    """The box ends by itself after this long, unless it is renewed."""
    metadata: Mapping[str, str]
    """Tags by which it is found again."""


class Cloud:
    """An account with E2B."""

    def __init__(self, settings: E2BSettings) -> None:
        self._settings = settings

    def check(self) -> None:
        """UsageError where it cannot be used, saying what to do."""
        if not self._settings.api_key.get_secret_value():
            raise UsageError("e2b needs an account's key", argument="sandbox", remedy="set E2B_API_KEY")
        if importlib.util.find_spec("e2b") is None:
            raise UsageError("e2b needs its SDK", argument="sandbox", remedy="run: pip install 'rollcage[e2b]'")

    @property
    def options(self) -> dict[str, Any]:
        """What every call of the SDK is given. Its own retries are off: ours know what may be asked twice."""
        told = {
            "api_key": self._settings.api_key.get_secret_value(),
            "domain": self._settings.domain,
            "api_url": self._settings.api_url,
            "sandbox_url": self._settings.sandbox_url,
        }
        return {**{name: value for name, value in told.items() if value}, "retries": 0}

    async def create(self, order: BoxOrder) -> AsyncSandbox:
        """Order a box, again where the cloud is busy or does not answer; never two for one order."""
        from e2b import AsyncSandbox

        self.check()
        key = secrets.token_hex(16)
        attempt = 0
        while True:
            try:
                return await AsyncSandbox.create(
                    template=order.template or None,
                    timeout=order.ttl_s,
                    metadata=dict(order.metadata),
                    allow_internet_access=False,
                    idempotency_key=key,
                    request_timeout=REQUEST_TIMEOUT_S,
                    **self.options,
                )
            except Exception as error:
                attempt += 1
                if not _passes(error) or attempt == CREATE_ATTEMPTS:
                    times = f" after {attempt} attempts" if attempt > 1 else ""
                    raise translated(error, f"cannot open a box at E2B{times}", opening=True) from error
            # Many that were turned away together must not come back together.
            longest = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**attempt)
            await asyncio.sleep(random.uniform(longest / 4, longest))  # noqa: S311 - no secret

    async def renew(self, box_id: str, ttl_s: int) -> None:
        """Let it live so long from now; SandboxLost where it does not live any more."""
        from e2b import AsyncSandbox

        with boundary(f"cannot renew {box_id}"):
            await AsyncSandbox.set_timeout(box_id, ttl_s, request_timeout=REQUEST_TIMEOUT_S, **self.options)

    async def kill(self, box_id: str) -> None:
        """Give it back; nothing where it is gone already."""
        from e2b import AsyncSandbox

        for attempt in range(_KILL_ATTEMPTS):
            try:
                await AsyncSandbox.kill(box_id, request_timeout=REQUEST_TIMEOUT_S, **self.options)
                return
            except Exception as error:
                if not _passes(error) or attempt == _KILL_ATTEMPTS - 1:
                    raise translated(error, f"cannot close {box_id}") from error
            await asyncio.sleep(_FIRST_DELAY_S)

    async def find(self, metadata: Mapping[str, str]) -> AsyncIterator[tuple[str, dict[str, str]]]:
        """Every box with these tags: its id and all its tags."""
        from e2b import AsyncSandbox, SandboxQuery

        pages = AsyncSandbox.list(SandboxQuery(metadata=dict(metadata)), limit=_PAGE, **self.options)
        while pages.has_next:
            with boundary("cannot list boxes at E2B"):
                found = await pages.next_items()
            for info in found:
                yield info.sandbox_id, dict(info.metadata or {})


def _passes(error: Exception) -> bool:
    """Whether the same order may be filled later: busy, broken or out of reach, but not refused."""
    import e2b
    import httpx

    if isinstance(error, e2b.RateLimitException | e2b.TimeoutException | httpx.TransportError | OSError):
        return True
    status = getattr(error, "status_code", None)
    return isinstance(status, int) and status >= 500


@contextmanager
def boundary(what: str) -> Iterator[None]:
    """Raise what the SDK raises as errors of ours; `what` says what was tried."""
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:
        raise translated(error, what) from error


def translated(error: Exception, what: str, *, opening: bool = False) -> Exception:
    """An error of the SDK as one of ours."""
    import e2b
    import httpx

    said = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    if isinstance(error, e2b.AuthenticationException):
        return SetupError(f"{what}: E2B refuses the key ({said})", remedy="check E2B_API_KEY")
    if not opening and isinstance(error, e2b.SandboxNotFoundException):
        return BoxGone(f"{what}: the box is gone ({said})")
    if not opening and isinstance(error, e2b.TimeoutException | httpx.TransportError | OSError):
        return SandboxLost(f"{what}: the box is gone or out of reach ({said})")
    return SandboxError(f"{what}: {said}")
