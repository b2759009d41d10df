"""The rollout tools: names, arguments, answers. No transport: the MCP endpoint and the environment both call here."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import anyio
from pydantic import Field, ValidationError

from rollcage.errors import RollcageError, UnknownBatch, UnknownGroup, UnknownRollout, UsageError
from rollcage.evaluation.batches import BatchReport
from rollcage.events import Event, StageStarted, TurnEnded
from rollcage.mcp.types import RESERVED
from rollcage.results.result import RolloutResult
from rollcage.schema.batches import BatchRequest
from rollcage.schema.errors import QueueFull, Stopping
from rollcage.schema.fingerprint import Conflict
from rollcage.schema.groups import (
    AbortedRollouts,
    GatewayPause,
    GatewayResume,
    GatewayState,
    Group,
    GroupPage,
    GroupRequest,
)
from rollcage.schema.request import RolloutRequest, bad_argument
from rollcage.schema.views import Aborted, EventPage, Messages, RolloutState, Started, unknown_state
from rollcage.server import mcp_batches, mcp_groups
from rollcage.server.auth import Caller
from rollcage.server.service import Service
from rollcage.types import JsonObject, Value

logger = logging.getLogger(__name__)


class RunArguments(RolloutRequest):
    """What `run_rollout` takes: a rollout, and what becomes of it if nobody waits for it any more."""

    on_disconnect: Literal["continue", "abort"] = "continue"
    """What happens when the caller goes away, cancels or runs out of time before the end: `continue` lets the rollout
    go on (an `idempotency_key` finds it again), `abort` stops it. Without meaning for `start_rollout`."""


class RolloutId(Value):
    """Names one rollout."""

    rollout_id: str = Field(max_length=200)
    """The id that `start_rollout` gave."""


class EventArguments(RolloutId):
    """Which part of a log is wanted."""

    after: int = Field(default=0, ge=0, lt=2**63)
    """Only events with a higher `seq` than this."""


class FinalizeArguments(RolloutId):
    """How long to wait for the end."""

    wait_s: float = Field(default=300, ge=0)
    """Seconds to wait for the end; after that the answer says how far it is, with `outcome` null."""


@dataclass
class CallProgress:
    """How far a call is. Whoever waits for the call may look at it at any time."""

    wanted: bool = False
    """Whether somebody looks."""
    rollout_id: str = ""
    """The rollout that the call started; empty before there is one."""
    stage: str = "queued"
    turns: int = 0
    _news: anyio.Event = field(default_factory=anyio.Event)

    def see(self, event: Event) -> None:
        """Take note of an event of the rollout."""
        match event:
            case StageStarted(stage=stage):
                self.stage = stage.value
            case TurnEnded():
                self.turns += 1
            case _:
                return
        self._news.set()

    async def news(self, seconds: float) -> None:
        """Wait until something happens, at most this long."""
        with anyio.move_on_after(seconds):
            await self._news.wait()
        self._news = anyio.Event()

    @property
    def words(self) -> str:
        """For people: the stage and the model calls so far."""
        return f"{self.stage}, {self.turns} turn{'' if self.turns == 1 else 's'} so far"


class ToolFailure(Exception):
    """A call that came to nothing: what was wrong and what to do."""

    def __init__(self, message: str, code: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.argument = message, code, argument

    @property
    def problem(self) -> JsonObject:
        """For programs."""
        return {"error": self.message, "error_code": self.code, "argument": self.argument}


Run = Callable[[Service, Any, Caller, CallProgress], Awaitable[Value]]


@dataclass(frozen=True)
class RolloutTool:
    """One tool: how it is described and what it does."""

    name: str
    description: str
    arguments: type[Value]
    answer: type[Value]
    run: Run
    unknown: Callable[[str], Value] | None = None
    """What the older shape answers for an id that nobody knows; None where no id is asked for."""
    reads_only: bool = False
    is_slow: bool = False
    """Whether it may take minutes, so that progress is worth telling."""
    is_brief: bool = False
    """Whether its answers are short, however long the rollout is."""

    @cached_property
    def input_schema(self) -> JsonObject:
        """What it takes, as JSON Schema."""
        return _untitled(self.arguments.model_json_schema())

    @cached_property
    def output_schema(self) -> JsonObject:
        """What it answers, as JSON Schema."""
        schema = self.answer.model_json_schema(mode="serialization")
        if self.answer is EventPage:
            # Every kind of event in full would be longer than all the other schemas together.
            schema["properties"]["events"]["items"] = {"type": "object", "description": "One entry of the log."}
            schema.pop("$defs", None)
        return _untitled(schema)

    def parsed(self, arguments: object) -> Value:
        """The arguments as a value; ToolFailure where they make no sense."""
        if not isinstance(arguments, Mapping):
            raise ToolFailure(f"{self.name}: arguments must be an object", "bad_argument", "arguments")
        try:
            if issubclass(self.arguments, RolloutRequest):
                return self.arguments.parsed(dict(arguments))
            # Null is the same as not given, here too.
            given = {name: value for name, value in arguments.items() if value is not None}
            return self.arguments.model_validate(given)
        except UsageError as error:
            raise failure_of(error) from None
        except ValidationError as error:
            raise failure_of(bad_argument(error, list(self.arguments.model_fields))) from None


def _untitled(schema: JsonObject) -> JsonObject:
    """Without what only forms show: models read these schemas, and pay for each word."""

    def clean(node: object, *, names: bool = False) -> object:
        if isinstance(node, list):
            return [clean(each) for each in node]
        if not isinstance(node, dict):
            return node
        kept = {key: value for key, value in node.items() if names or not _is_for_people(key, value)}
        return {key: clean(value, names=not names and key in ("properties", "$defs")) for key, value in kept.items()}

    cleaned = clean(schema)
    return cleaned if isinstance(cleaned, dict) else schema


def _is_for_people(key: str, value: object) -> bool:
    return key.startswith("x-") or (key == "title" and isinstance(value, str))


async def call(
    tool: RolloutTool, arguments: object, service: Service, caller: Caller, progress: CallProgress, *, older: bool
) -> Value:
    """Call a tool; ToolFailure where it comes to nothing.

    `older`: the caller knows the older shape, which answers an unknown id with a payload and not with an error.
    """
    # The arguments of a rollout can be large; meanwhile the others go on.
    large = issubclass(tool.arguments, RolloutRequest)
    given = await anyio.to_thread.run_sync(tool.parsed, arguments) if large else tool.parsed(arguments)
    try:
        return await tool.run(service, given, caller, progress)
    except UnknownGroup as error:
        raise ToolFailure(
            f"{error}; start_group gives names, and only to who asked for them", "unknown_group"
        ) from error
    except UnknownBatch as error:
        raise ToolFailure(f"{error}; start_batch makes one", "unknown_batch", "name") from error
    except UnknownRollout as error:
        rollout_id = getattr(given, "rollout_id", "")
        if older and tool.unknown is not None:
            return tool.unknown(rollout_id)
        message = f"unknown rollout_id: {rollout_id}; start_rollout gives ids, and only to who asked for them"
        raise ToolFailure(message, "unknown_rollout", "rollout_id") from error
    except Exception as error:
        raise failure_of(error) from error


def failure_of(error: Exception) -> ToolFailure:
    """What to tell a caller about what broke. Faults of our own are logged and not shown."""
    match error:
        case ToolFailure():
            return error
        case Conflict():
            return ToolFailure(str(error), "conflict", error.argument)
        case UsageError():
            return ToolFailure(str(error), "bad_argument", error.argument or None)
        case QueueFull():
            return ToolFailure(f"{error}; try again in {error.retry_after_s:g} s", "queue_full")
        case Stopping():
            return ToolFailure(str(error), "stopping")
        case RollcageError():
            return ToolFailure(str(error), "failed")
        case _:
            logger.exception("a tool call broke", exc_info=error)
            return ToolFailure(f"internal error ({type(error).__name__}); the server's log has more", "internal_error")


async def _run(service: Service, request: RunArguments, caller: Caller, progress: CallProgress) -> RolloutResult:
    started = await service.start(request, caller)
    progress.rollout_id = started.rollout_id
    try:
        if progress.wanted:
            async with aclosing(await service.follow(started.rollout_id, caller)) as entries:
                async for entry in entries:
                    progress.see(entry.event)
        return await service.finalize(started.rollout_id, caller)
    except anyio.get_cancelled_exc_class():
        # Whoever joined a rollout by its idempotency key is not the one to end it.
        if request.on_disconnect == "abort" and not started.joined:
            with anyio.CancelScope(shield=True):
                await service.abort(started.rollout_id, caller, reason="whoever asked for it went away")
        raise


async def _start(service: Service, request: RunArguments, caller: Caller, progress: CallProgress) -> Started:
    return await service.start(request, caller)


async def _state(service: Service, wanted: RolloutId, caller: Caller, progress: CallProgress) -> RolloutState:
    return await service.state(wanted.rollout_id, caller)


async def _messages(service: Service, wanted: RolloutId, caller: Caller, progress: CallProgress) -> Messages:
    return await service.messages(wanted.rollout_id, caller)


async def _events(service: Service, wanted: EventArguments, caller: Caller, progress: CallProgress) -> EventPage:
    return await service.events(wanted.rollout_id, caller, after=wanted.after)


async def _abort(service: Service, wanted: RolloutId, caller: Caller, progress: CallProgress) -> Aborted:
    return await service.abort(wanted.rollout_id, caller, reason="asked for by abort_rollout")


async def _finalize(
    service: Service, wanted: FinalizeArguments, caller: Caller, progress: CallProgress
) -> RolloutResult:
    progress.rollout_id = wanted.rollout_id
    return await service.finalize(wanted.rollout_id, caller, wait_s=wanted.wait_s)


def _no_result(rollout_id: str) -> RolloutResult:
    error = f"unknown rollout_id: {rollout_id}"
    return RolloutResult(task_id="", rollout_id=rollout_id, error=error, error_code="unknown_rollout")


_TOOLS = (
    RolloutTool(
        "run_rollout",
        "Run one rollout to its end: a coding agent works on the instruction in a box of its own, then its work is "
        "verified. Gives the reward, every model call with its tokens, and the files it left. Takes minutes.",
        RunArguments,
        RolloutResult,
        _run,
        is_slow=True,
    ),
    RolloutTool(
        "start_rollout",
        "Start a rollout and return at once; the other tools follow it by its rollout_id.",
        RunArguments,
        Started,
        _start,
        is_brief=True,
    ),
    RolloutTool(
        "get_state",
        "Where a rollout is: queued, starting, running, verifying or done, and how many model calls it has made.",
        RolloutId,
        RolloutState,
        _state,
        unknown_state,
        reads_only=True,
        is_brief=True,
    ),
    RolloutTool(
        "get_messages",
        "The agent's own transcript so far, live: messages with their parts.",
        RolloutId,
        Messages,
        _messages,
        lambda rollout_id: Messages(rollout_id=rollout_id, status="unknown"),
        reads_only=True,
    ),
    RolloutTool(
        "subscribe_events",
        "A page of a rollout's events after a given one, and the address that streams them as server-sent events.",
        EventArguments,
        EventPage,
        _events,
        lambda rollout_id: EventPage(rollout_id=rollout_id, status="unknown", ended=True),
        reads_only=True,
    ),
    RolloutTool(
        "abort_rollout",
        "Stop a rollout: the model call in flight is cut, the agent dies, the box is gone.",
        RolloutId,
        Aborted,
        _abort,
        lambda rollout_id: Aborted(rollout_id=rollout_id, aborted=False, reason=f"unknown rollout_id: {rollout_id}"),
        is_brief=True,
    ),
    RolloutTool(
        "finalize_rollout",
        "Wait for a rollout's end and get what it came to; asking again gives the same answer.",
        FinalizeArguments,
        RolloutResult,
        _finalize,
        _no_result,
        reads_only=True,
    ),
)

_GROUP_TOOLS = (
    RolloutTool(
        "start_group",
        "Start n rollouts of one task at once; with min_usable, the rest is stopped when so many are usable.",
        GroupRequest,
        Group,
        mcp_groups.start,
    ),
    RolloutTool(
        "wait_groups",
        "Wait until rollouts of some groups end; tells which ended since the cursor, with reward or blame.",
        mcp_groups.WaitArguments,
        GroupPage,
        mcp_groups.wait,
        reads_only=True,
    ),
    RolloutTool(
        "abort_group",
        "Stop what still runs of a group, or all open rollouts of older weights.",
        mcp_groups.AbortArguments,
        AbortedRollouts,
        mcp_groups.abort,
        is_brief=True,
    ),
    RolloutTool(
        "get_group_sequences",
        "The ended rollouts of a group as merged token sequences, for training.",
        mcp_groups.SequenceArguments,
        mcp_groups.GroupSequences,
        mcp_groups.sequences,
        reads_only=True,
    ),
    RolloutTool(
        "pause_gateway",
        "Let no model call begin while weights are changed; returns when none runs. For admins.",
        GatewayPause,
        GatewayState,
        mcp_groups.pause,
        is_brief=True,
    ),
    RolloutTool(
        "resume_gateway",
        "Let model calls begin again, with the weights that are named. For admins.",
        GatewayResume,
        GatewayState,
        mcp_groups.resume,
        is_brief=True,
    ),
)

_BATCH_TOOLS = (
    RolloutTool(
        "start_batch",
        "Run every task x model x agent n times, as one batch, and return at once; the same again goes on with it.",
        BatchRequest,
        BatchReport,
        mcp_batches.start,
    ),
    RolloutTool(
        "get_batch",
        "What a batch came to so far: where it is, means with intervals and pass@k by model and by task, what broke.",
        mcp_batches.BatchName,
        BatchReport,
        mcp_batches.look,
        reads_only=True,
    ),
)

TOOLS = {tool.name: tool for tool in _TOOLS}
"""What the OpenEnv environment offers, by name: rollouts."""
EVERY_TOOL = TOOLS | {tool.name: tool for tool in (*_GROUP_TOOLS, *_BATCH_TOOLS)}
"""What the MCP endpoint offers: groups, the gateway, and batches, beside them."""

if RESERVED & EVERY_TOOL.keys():
    raise AssertionError(f"reserved tool names: {RESERVED & EVERY_TOOL.keys()}")


def find(name: object, known: Mapping[str, RolloutTool] = TOOLS) -> RolloutTool:
    """The tool of that name; ToolFailure where there is none."""
    if isinstance(name, str) and name in known:
        return known[name]
    raise ToolFailure(f"unknown tool {name!r}; known are {', '.join(known)}", "unknown_tool")
