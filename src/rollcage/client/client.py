"""The async client: a method for each thing that a rollcage server can be asked.

Only what is safe is tried again: reading always; starting, because every start carries an idempotency key.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Unpack
from urllib.parse import quote

import anyio
import httpx
from pydantic import SecretStr, ValidationError

from rollcage.client.connection import LONGEST_WAIT_S, ServerConnection
from rollcage.errors import UnknownBatch, UnknownGroup, UnknownRollout
from rollcage.evaluation.batches import BatchReport
from rollcage.events import Entry
from rollcage.results.result import RolloutResult
from rollcage.schema.arguments import RolloutArguments
from rollcage.schema.batches import BatchRequest
from rollcage.schema.groups import (
    AbortedRollouts,
    Capacity,
    GatewayPause,
    GatewayResume,
    GatewayState,
    Group,
    GroupPage,
    GroupRequest,
    Until,
)
from rollcage.schema.request import RolloutRequest, bad_argument
from rollcage.schema.views import Aborted, Files, Messages, RolloutPage, RolloutState, Started, Trace, TurnPage
from rollcage.trajectory import Sequence as TokenSequence
from rollcage.types import JsonObject


class Client(ServerConnection):
    """One server. Any number of tasks may use it at once."""

    async def start(self, instruction: str, **arguments: Unpack[RolloutArguments]) -> Started:
        """Start a rollout; the arguments are those of `RolloutRequest`, and are checked here before anything is sent.

        An idempotency key is made up where none is given, so that a repeated request starts nothing twice.
        """
        key = arguments.get("idempotency_key") or secrets.token_hex(16)
        request = RolloutRequest.parsed({**arguments, "instruction": instruction, "idempotency_key": key})
        return await self._ask(Started, "POST", "/rollouts", json=_revealed(request), safe=True)

    async def run(self, instruction: str, **arguments: Unpack[RolloutArguments]) -> RolloutResult:
        """Start a rollout and wait for what it comes to. Cancelling this leaves it running."""
        return await self.wait((await self.start(instruction, **arguments)).rollout_id)

    async def state(self, rollout_id: str) -> RolloutState:
        """Where it is."""
        return await self._ask(RolloutState, "GET", _path(rollout_id))

    async def result(self, rollout_id: str) -> RolloutResult:
        """What it came to so far; `outcome` is None while it runs."""
        return await self._ask(RolloutResult, "GET", _path(rollout_id, "/result"))

    async def wait(self, rollout_id: str, *, wait_s: float | None = None) -> RolloutResult:
        """What it came to, once it has ended; TimeoutError where that takes longer than `wait_s`."""
        with anyio.fail_after(wait_s):
            while True:
                result = await self._ask(
                    RolloutResult, "GET", _path(rollout_id, "/result"), params={"wait_s": LONGEST_WAIT_S}
                )
                if result.outcome is not None:
                    return result

    async def follow(self, rollout_id: str, *, after: int = 0) -> AsyncGenerator[Entry, None]:
        """Every entry above `after`, then each new one; over after `Ended`. Use `aclosing`.

        A stream that breaks is taken up where it broke: no entry is lost, none comes twice.
        """
        async with aclosing(self._entries(_path(rollout_id, "/events"), after)) as entries:
            async for entry in entries:
                yield entry

    async def abort(self, rollout_id: str, reason: str = "", *, wait_s: float = 0) -> Aborted:
        """Stop it. `wait_s`: return only when it has ended, or when so much time has passed."""
        params = {"reason": reason, "wait_s": wait_s}
        # A second request to stop the same rollout does nothing, so this too may be repeated.
        return await self._ask(Aborted, "DELETE", _path(rollout_id), params=params, safe=True)

    async def page(self, /, *, cursor: str = "", limit: int = 50, **filters: str) -> RolloutPage:
        """Some rollouts, newest first. Filters: `status, stage, outcome, task_id, agent, model, text`."""
        given = {name: value for name, value in filters.items() if value}
        params = {**given, "limit": str(limit), **({"cursor": cursor} if cursor else {})}
        return await self._ask(RolloutPage, "GET", "/rollouts", params=params)

    async def list(self, /, **filters: str) -> AsyncGenerator[RolloutState, None]:
        """All rollouts that match, newest first, page after page."""
        cursor: str | None = ""
        while cursor is not None:
            page = await self.page(cursor=cursor, limit=200, **filters)
            for state in page.rollouts:
                yield state
            cursor = page.next_cursor

    async def messages(self, rollout_id: str) -> Messages:
        """The agent's own transcript so far."""
        return await self._ask(Messages, "GET", _path(rollout_id, "/messages"))

    async def files(self, rollout_id: str) -> Files:
        """What the agent left in the workdir."""
        return await self._ask(Files, "GET", _path(rollout_id, "/files"))

    async def turns(self, rollout_id: str, *, after: int = 0, limit: int = 20) -> TurnPage:
        """Some of the model calls, whole."""
        params = {"after": after, "limit": limit}
        return await self._ask(TurnPage, "GET", _path(rollout_id, "/turns"), params=params)

    async def trace(self, rollout_id: str, *, after: int = 0, limit: int = 50) -> Trace:
        """Some of the model calls, token by token."""
        params = {"after": after, "limit": limit}
        return await self._ask(Trace, "GET", _path(rollout_id, "/trace"), params=params)

    async def start_group(
        self, instruction: str, n: int, *, min_usable: int = 0, **arguments: Unpack[RolloutArguments]
    ) -> Group:
        """Start n rollouts of one task. An idempotency key is made up where none is given."""
        key = arguments.get("idempotency_key") or secrets.token_hex(16)
        asked = {**arguments, "instruction": instruction, "idempotency_key": key, "n": n, "min_usable": min_usable}
        request = GroupRequest.parsed(asked)
        return await self._ask(Group, "POST", "/groups", json=_revealed(request), safe=True)

    async def group(self, group_id: str) -> Group:
        """Where a group is, with its rollouts."""
        return await self._ask(Group, "GET", _group(group_id))

    async def wait_groups(
        self, group_ids: Sequence[str], *, until: Until = "all", cursor: int = 0, wait_s: float | None = None
    ) -> GroupPage:
        """What has ended in some groups since the cursor: when some rollout has (`any`), or when all are done.

        TimeoutError where that takes longer than `wait_s`.
        """
        params = {"group_id": list(group_ids), "until": until, "cursor": cursor, "wait_s": LONGEST_WAIT_S}
        with anyio.fail_after(wait_s):
            while True:
                page = await self._ask(GroupPage, "GET", "/groups", params=params)
                if page.done or (until == "any" and page.ended):
                    return page

    async def abort_group(self, group_id: str, reason: str = "") -> AbortedRollouts:
        """Stop what still runs of a group."""
        return await self._ask(AbortedRollouts, "DELETE", _group(group_id), params={"reason": reason}, safe=True)

    async def abort_older(self, policy_version: str, reason: str = "") -> AbortedRollouts:
        """Stop open rollouts whose policy version is older than this one."""
        params = {"policy_version_below": policy_version, "reason": reason}
        return await self._ask(AbortedRollouts, "DELETE", "/groups", params=params, safe=True)

    async def group_sequences(
        self, group_id: str, *, usable_only: bool = False, per_turn: bool = False
    ) -> builtins.list[TokenSequence]:
        """The ended rollouts of a group as merged sequences, in one answer."""
        import msgspec

        params = {"usable_only": usable_only, "per_turn": per_turn}
        headers = {"Accept": "application/msgpack"}
        answer = await self._fetch("GET", _group(group_id, "/sequences"), params=params, headers=headers)
        rows = msgspec.msgpack.decode(answer.content)["sequences"]
        return [TokenSequence.model_validate(row) for row in rows]

    async def start_batch(
        self, /, tasks: Sequence[Mapping[str, Any]], models: Sequence[str] = (), **more: Any
    ) -> BatchReport:
        """Run every task x model x agent, n times. `tasks`: arguments of rollouts; `more`: those of `BatchRequest`.

        The same again joins the batch, and goes on with what is missing of it.
        """
        asked = [RolloutRequest.parsed(task) for task in tasks]
        try:
            request = BatchRequest(tasks=tuple(asked), models=tuple(models), **more)
        except ValidationError as error:
            raise bad_argument(error, builtins.list(BatchRequest.model_fields)) from None
        body = {**_revealed(request), "tasks": [_revealed(task) for task in asked]}
        return await self._ask(BatchReport, "POST", "/batches", json=body, safe=True)

    async def batch(self, name: str) -> BatchReport:
        """Where a batch is, and what it came to so far."""
        return await self._ask(BatchReport, "GET", _batch(name))

    async def wait_batch(self, name: str, *, wait_s: float | None = None) -> BatchReport:
        """What a batch came to, once it does not run any more; TimeoutError where that takes longer than `wait_s`."""
        with anyio.fail_after(wait_s):
            while True:
                report = await self.batch(name)
                if report.status not in ("new", "running", "paused"):
                    return report
                await anyio.sleep(1)

    async def batch_rollouts(self, name: str) -> builtins.list[JsonObject]:
        """The latest rollout of each combination, a row each."""
        found: builtins.list[JsonObject] = []
        while True:
            params = {"offset": len(found), "limit": 10_000}
            page = (await self._fetch("GET", _batch(name, "/results"), params=params)).json()
            found += page["rollouts"]
            if len(found) >= page["total"] or not page["rollouts"]:
                return found

    async def cancel_batch(self, name: str) -> BatchReport:
        """Stop what runs of a batch, and begin nothing more of it."""
        return await self._ask(BatchReport, "POST", _batch(name, "/cancel"), safe=True)

    async def capacity(self) -> Capacity:
        """How much more can be started."""
        return await self._ask(Capacity, "GET", "/capacity")

    async def pause(self, running: Literal["finish", "cut"] = "finish", *, wait_s: float = 600) -> GatewayState:
        """Let no model call begin; returns when none runs any more, or after `wait_s`. For admins."""
        asked = GatewayPause(running=running, wait_s=wait_s)
        timeout = httpx.Timeout(30, read=wait_s + 30)
        more = {"json": asked.model_dump(), "timeout": timeout}
        return await self._ask(GatewayState, "POST", "/gateway/pause", safe=True, **more)

    async def resume(self, policy_version: str = "") -> GatewayState:
        """Let calls begin again, with these weights. For admins."""
        asked = GatewayResume(policy_version=policy_version)
        return await self._ask(GatewayState, "POST", "/gateway/resume", safe=True, json=asked.model_dump())


def _path(rollout_id: str, below: str = "") -> str:
    if not rollout_id.isalnum():
        raise UnknownRollout(f"unknown rollout_id: {rollout_id}")
    return f"/rollouts/{rollout_id}{below}"


def _group(group_id: str, below: str = "") -> str:
    if not group_id:
        raise UnknownGroup("a group has a name")
    return f"/groups/{quote(group_id, safe='')}{below}"


def _batch(name: str, below: str = "") -> str:
    if not name:
        raise UnknownBatch("a batch has a name")
    return f"/batches/{quote(name, safe='')}{below}"


def _revealed(request: RolloutRequest | BatchRequest) -> Mapping[str, Any]:
    """What is sent: what was given, the keys as they are."""
    given = request.model_dump(mode="json", exclude_unset=True)
    for name in given:
        value = getattr(request, name)
        if isinstance(value, SecretStr):
            given[name] = value.get_secret_value()
    return given
