"""What a tool of ours is, and how one is called. No transport: the MCP endpoint and the environment both call here."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_type_hints

import anyio
from pydantic import ValidationError

from rollcage.errors import RollcageError, UnknownBatch, UnknownGroup, UnknownRollout, UsageError
from rollcage.events import Event, StageStarted, TurnEnded
from rollcage.schema.errors import QueueFull, Stopping
from rollcage.schema.fingerprint import Conflict
from rollcage.schema.request import RolloutRequest, bad_argument
from rollcage.schema.views import EventPage
from rollcage.server.auth import Caller
from rollcage.server.service import Service
from rollcage.types import JsonObject, Value

logger = logging.getLogger(__name__)


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
    """One tool. The function that does it declares the rest: its name, its docstring, and the types that it takes and
    answers.
    """

    run: Run
    unknown: Callable[[str], Value] | None = None
    """What the older shape answers for an id that nobody knows; None where no id is asked for."""
    reads_only: bool = False
    is_slow: bool = False
    """Whether it may take minutes, so that progress is worth telling."""
    is_brief: bool = False
    """Whether its answers are short, however long the rollout is."""

    @property
    def name(self) -> str:
        """What it is called by."""
        return self.run.__name__

    @cached_property
    def description(self) -> str:
        """What it does, for models and people."""
        return " ".join((inspect.getdoc(self.run) or "").split())

    @cached_property
    def arguments(self) -> type[Value]:
        """What it takes."""
        kind: type[Value] = get_type_hints(self.run)["wanted"]
        return kind

    @cached_property
    def answer(self) -> type[Value]:
        """What it answers."""
        kind: type[Value] = get_type_hints(self.run)["return"]
        return kind

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
