"""The log of one rollout as the spans of one trace: stages, commands, turns and tools, by the GenAI conventions. Pure.

All ids are made of the rollout's: the same log gives the same trace, however often it is sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from rollcage.agent_events import AgentToolCall
from rollcage.events import (
    AgentEmitted,
    AgentEnded,
    AgentStarted,
    BoxOpened,
    CommandEnded,
    Ended,
    Entry,
    Queued,
    Requeued,
    Scored,
    StageEnded,
    StageStarted,
    Suspicion,
    ToolCalled,
    TurnEnded,
)
from rollcage.json_safe import json_safe
from rollcage.otel.contents import contents_of, shortened
from rollcage.types import Job, Stage, Turn

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
MOST_PARTS = 100
"""Parts of a reward that are told of."""
LONGEST_NAME = 200

Attributes = Mapping[str, AttributeValue | None]


@dataclass
class _Span:
    name: str
    start: float
    parent: _Span | None = None
    kind: SpanKind = SpanKind.INTERNAL
    end: float = 0.0
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    error: str = ""
    """What went wrong, in one stable word."""
    told: str = ""
    """The same in words, where contents are sent."""

    def set(self, attributes: Attributes) -> None:
        """Those that there are; texts of agents and engines may be no texts."""
        said = {name: value for name, value in attributes.items() if value is not None and value != ""}
        self.attributes.update({name: json_safe(value) for name, value in said.items()})


def spans_of(entries: Sequence[Entry], resource: Resource, *, content: bool = False) -> list[ReadableSpan]:
    """The trace of a rollout that has ended; `content`: with what was said, asked and printed."""
    trace = _Trace(content)
    for entry in entries:
        trace.apply(entry)
    rollout_id = entries[0].rollout_id if entries else ""
    return list(_readable(trace.spans, rollout_id, resource))


def trace_id(rollout_id: str) -> int:
    """The rollout's id twice, in hexadecimal; of an id of another form, its digest."""
    if len(rollout_id) == 16 and set(rollout_id) <= set("0123456789abcdef") and int(rollout_id, 16):
        return int(rollout_id * 2, 16)
    return int.from_bytes(blake2b(rollout_id.encode(), digest_size=16).digest())


class _Trace:
    """Spans while the log is read."""

    def __init__(self, content: bool) -> None:
        self._content = content
        self.spans: list[_Span] = []
        self._stage: _Span | None = None
        self._tools: dict[tuple[str, ...], _Span] = {}
        self._job: Job

    def _open(self, name: str, start: float, parent: _Span | None = None, kind: SpanKind = SpanKind.INTERNAL) -> _Span:
        span = _Span(json_safe(name)[:LONGEST_NAME], start, parent, kind)
        self.spans.append(span)
        return span

    @property
    def _root(self) -> _Span:
        return self.spans[0]

    def apply(self, entry: Entry) -> None:
        """One more entry of the log."""
        now = entry.time
        match entry.event:
            case Queued() as queued:
                self._begin(queued, entry.rollout_id, now)
            case Requeued():
                self._close_stage(now, "crashed")
                self._stage = self._open("queued", now, self._root)
            case StageStarted(stage=stage):
                self._close_stage(now)
                name = f"invoke_agent {self._job.agent.name}" if stage is Stage.AGENT else stage.value
                self._stage = self._open(name, now, self._root)
                self._stage.set({"rollcage.stage": stage.value, **(self._agent() if stage is Stage.AGENT else {})})
            case StageEnded():
                self._close_stage(now)
            case BoxOpened(sandbox_id=sandbox_id, backend=backend):
                self._root.set({"rollcage.sandbox.id": sandbox_id, "rollcage.sandbox.backend": backend})
            case AgentStarted(version=version):
                self._within.set({"gen_ai.agent.version": version})
            case AgentEnded(exit_code=exit_code, timed_out=timed_out, error=error):
                self._within.set({"rollcage.agent.exit_code": exit_code, "rollcage.agent.timed_out": timed_out})
                self._within.error = "timeout" if timed_out else "agent_failed" if exit_code else ""
                self._within.told = error or ""
            case CommandEnded() as command:
                self._command(command, now)
            case TurnEnded(turn=turn):
                self._turn(turn)
            case AgentEmitted(event=AgentToolCall() as call):
                self._tool(call, now)
            case ToolCalled() as called:
                self._remote_tool(called, now)
            case Suspicion(code=code, what=what):
                words = {"rollcage.suspicion.code": code, "rollcage.suspicion.what": what if self._content else ""}
                self._event("rollcage.suspicion", words, now)
            case Scored() as scored:
                self._scored(scored, now)
            case Ended() as ended:
                self._end(ended, now)
            case _:
                pass

    @property
    def _within(self) -> _Span:
        return self._stage or self._root

    def _begin(self, queued: Queued, rollout_id: str, now: float) -> None:
        job = self._job = queued.job
        root = self._open(f"rollout {job.task.id}".rstrip(), now)
        root.set(
            {
                "rollcage.rollout.id": rollout_id,
                "rollcage.task.id": job.task.id,
                "rollcage.group.id": job.group_id,
                "rollcage.policy_version": job.policy_version,
                "rollcage.reverifies": queued.reverifies,
                "rollcage.instruction": shortened(job.task.instruction) if self._content else "",
                **self._agent(),
            }
        )
        if batch := queued.batch:
            root.set(
                {
                    "rollcage.batch.name": batch.name,
                    "rollcage.batch.sample": batch.sample,
                    "rollcage.batch.attempt": batch.attempt,
                    "rollcage.batch.task_digest": batch.digest,
                }
            )
        if origin := queued.origin:
            root.set({"rollcage.origin.how": origin.how, "rollcage.origin.rollout.id": origin.rollout_id})
        del root.attributes["gen_ai.operation.name"]  # the agent's own span has it
        self._stage = self._open("queued", now, root)

    def _agent(self) -> Attributes:
        job = self._job
        return {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": job.agent.name,
            "gen_ai.provider.name": job.model.kind,
            "gen_ai.request.model": job.model.model,
        }

    def _turn(self, turn: Turn) -> None:
        request, usage, model = turn.request, turn.usage, self._job.model
        span = self._open(f"chat {model.model}", turn.started_at, self._within, SpanKind.CLIENT)
        span.end = turn.started_at + turn.seconds
        address = urlsplit(model.base_url)
        span.set(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": model.kind,
                "gen_ai.request.model": _word(request.get("model")) or model.model,
                "gen_ai.request.stream": turn.streamed,
                "gen_ai.request.max_tokens": _count(request.get("max_completion_tokens", request.get("max_tokens"))),
                "gen_ai.request.seed": _count(request.get("seed")),
                **{
                    f"gen_ai.request.{name}": _number(request.get(name))
                    for name in ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
                },
                "gen_ai.response.finish_reasons": [turn.finish_reason] if turn.finish_reason else None,
                "gen_ai.response.time_to_first_chunk": turn.first_token_s,
                "gen_ai.usage.input_tokens": _count(usage.get("prompt_tokens"), len(turn.prompt_ids)),
                "gen_ai.usage.output_tokens": _count(usage.get("completion_tokens"), len(turn.tokens)),
                "gen_ai.usage.cache_read.input_tokens": _count(_inner(usage, "prompt_tokens_details", "cached_tokens")),
                "gen_ai.conversation.id": turn.session,
                "server.address": address.hostname,
                "server.port": address.port,
                "rollcage.turn": turn.index + 1,
                "rollcage.turn.purpose": turn.purpose.value,
                "rollcage.turn.trainable": turn.trainable,
                "rollcage.turn.untrainable_reason": turn.untrainable_reason,
                "rollcage.policy_version": turn.policy_version,
                **(contents_of(turn) if self._content else {}),
            }
        )
        if turn.error is not None:
            span.error, span.told = str(turn.status) if turn.status >= 400 else "incomplete_answer", turn.error

    def _tool(self, call: AgentToolCall, now: float) -> None:
        key = (call.session, call.message, call.id or call.call_id)
        span = self._tools.get(key)
        if span is None or span.end:
            span = self._tools[key] = self._open(f"execute_tool {call.name}", now, self._within)
        if call.ended:
            span.end = now
            if call.seconds is not None:
                span.start = min(span.start, now - call.seconds)
        if call.status == "error":
            span.error, span.told = "tool_error", call.error
        span.set(
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": call.name[:LONGEST_NAME],
                "gen_ai.tool.call.id": call.call_id,
                "gen_ai.tool.type": "function",
                "rollcage.tool.kind": call.kind,
                "rollcage.tool.exit_code": call.exit_code,
            }
        )
        if self._content:
            self._said(span, call.arguments, call.result)

    def _remote_tool(self, called: ToolCalled, now: float) -> None:
        span = self._open(f"execute_tool {called.name}", now - called.seconds, self._within)
        span.end, span.error = now, "tool_error" if called.failed else ""
        span.told = called.error
        name = called.name[:LONGEST_NAME]
        span.set({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.type": "extension"})
        if self._content:
            self._said(span, called.arguments, called.answer)

    @staticmethod
    def _said(span: _Span, arguments: object, result: str) -> None:
        words = shortened(json.dumps(json_safe(arguments)))
        span.set({"gen_ai.tool.call.arguments": words, "gen_ai.tool.call.result": shortened(result)})

    def _command(self, command: CommandEnded, now: float) -> None:
        result = command.result
        span = self._open(f"{command.stage.value} command", now - result.seconds, self._within)
        span.end = now
        span.error = "timeout" if result.timed_out else "exit_code" if result.exit_code else ""
        span.set({"process.exit.code": result.exit_code})
        if self._content:
            output = {"rollcage.stdout": shortened(result.stdout), "rollcage.stderr": shortened(result.stderr)}
            span.set({"rollcage.command": shortened(result.command), **output})

    def _scored(self, scored: Scored, now: float) -> None:
        reward = scored.reward
        self._root.set({"rollcage.reward": reward.total, "rollcage.trust": reward.trust})
        parts = list(reward.parts.items())[:MOST_PARTS]
        for name, value in (("reward", reward.total), *((f"reward.{name}", value) for name, value in parts)):
            said: Attributes = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}
            self._event("gen_ai.evaluation.result", said, now)

    def _event(self, name: str, attributes: Attributes, now: float) -> None:
        said = {key: json_safe(value) for key, value in attributes.items() if value is not None and value != ""}
        self._root.events.append(Event(name, said, int(now * 1e9)))

    def _close_stage(self, now: float, error: str = "") -> None:
        if self._stage is not None:
            self._stage.end = now
            self._stage.error = self._stage.error or error
        self._stage = None

    def _end(self, ended: Ended, now: float) -> None:
        self._close_stage(now, ended.error_code or "")
        root = self._root
        root.end, root.told = now, ended.error or ""
        root.error = "" if ended.outcome.scored else ended.error_code or ended.outcome.value
        root.set({"rollcage.outcome": ended.outcome.value, "rollcage.blame": ended.blame and ended.blame.value})
        for span in self.spans:
            if not span.end:
                span.end, span.error = now, span.error or "interrupted"
        for span in self.spans:
            if not self._content:
                span.told = ""


def _readable(spans: Iterable[_Span], rollout_id: str, resource: Resource) -> Iterable[ReadableSpan]:
    scope = InstrumentationScope("rollcage", str(resource.attributes.get("service.version", "")), SCHEMA)
    contexts: dict[int, SpanContext] = {}
    for number, span in enumerate(spans):
        number_id = int.from_bytes(blake2b(f"{rollout_id}/{number}".encode(), digest_size=8).digest())
        contexts[id(span)] = context = SpanContext(
            trace_id(rollout_id), number_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )
        if span.error:
            span.attributes["error.type"] = span.error
        start = int(span.start * 1e9)
        yield ReadableSpan(
            name=span.name,
            context=context,
            parent=contexts[id(span.parent)] if span.parent else None,
            resource=resource,
            attributes=span.attributes,
            events=span.events,
            kind=span.kind,
            status=Status(StatusCode.ERROR, shortened(span.told or span.error)) if span.error else Status(),
            start_time=start,
            end_time=max(start, int(span.end * 1e9)),
            instrumentation_scope=scope,
        )


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: object, otherwise: int | None = None) -> int | None:
    # The engine's own word: it may be anything, and OTLP has 64 bits.
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else otherwise


def _inner(values: Mapping[str, object], *names: str) -> object:
    found: object = values
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found
