"""What the scripted model samples, and how an engine would hand it out: pure, token by token.

An answer is one text with marked spans (reasoning, content, a call's header and arguments). A token moves a frontier
over that text; what lies in a span becomes a delta, all else is swallowed, as an engine's parsers do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rollcage.simulators.scripted.template import TAGS, Call, answer_segments, call_text, dump, segment_ids
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.types import ScriptedTurn

Kind = Literal["reasoning", "content", "header", "arguments"]


class Span(NamedTuple):
    """A stretch of the sampled text that a client gets to see."""

    start: int
    end: int
    kind: Kind
    call: int = 0


class Sampled(NamedTuple):
    """One token, and how many characters of the text are known once it is there."""

    id: int
    end: int


@dataclass(frozen=True)
class Answer:
    """A whole answer as sampled, before anything cut it."""

    text: str
    tokens: tuple[Sampled, ...]
    spans: tuple[Span, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Truncation:
    """What may end an answer early, and in what portions it leaves."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = False
    interval: int | None = None
    """Tokens per chunk after the first; None: one to seven, as chance has it."""
    seed: bytes = b""


@dataclass(frozen=True)
class End:
    """Where an answer ends, and why."""

    tokens: int
    visible: int
    finish_reason: str
    stop_reason: str | int | None = None


@dataclass
class Piece:
    """What one chunk carries."""

    first: int
    """Index of its first token."""
    tokens: tuple[Sampled, ...]
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[Literal["header", "arguments"], int, str]] = field(default_factory=list)
    end: End | None = None

    @property
    def silent(self) -> bool:
        """Whether the parsers swallowed all of it."""
        return not (self.content or self.reasoning or self.calls)


def calls_of(turn: ScriptedTurn) -> tuple[Call, ...]:
    """The turn's tool calls as text."""
    return tuple(
        Call(call.name, dump(call.arguments) if call.raw_arguments is None else call.raw_arguments)
        for call in turn.tool_calls
    )


def compose(turn: ScriptedTurn, *, parse: bool = True, think: bool = True) -> Answer:
    """The tokens of a turn. Without `parse`, all of its text is content, as where an engine has no parser at work."""
    reasoning, calls = turn.reasoning if think else "", calls_of(turn)
    text, tokens = _tokens_of(answer_segments(reasoning, turn.text, calls))
    if not parse:
        return Answer(text, tokens, (Span(0, len(text), "content"),), ())
    spans: list[Span] = []
    at = 0
    if reasoning:
        at = len("<think>")
        spans.append(Span(at, at + len(reasoning), "reasoning"))
        at += len(reasoning) + len("</think>")
    spans.append(Span(at, at + len(turn.text), "content"))
    at += len(turn.text)
    for n, call in enumerate(calls):
        body = at + (1 if n else 0) + len("<tool_call>")
        name_end = body + len('\n{"name": ' + dump(call.name))
        arguments = name_end + len(', "arguments": ')
        spans.append(Span(name_end - 1, name_end, "header", n))
        spans.append(Span(arguments, arguments + len(call.arguments), "arguments", n))
        at = body + len(call_text(call)) + len("</tool_call>")
    return Answer(text, tokens, tuple(spans), calls)


def _tokens_of(segments: Sequence[str | int]) -> tuple[str, tuple[Sampled, ...]]:
    tokenizer = default_tokenizer()
    text = ""
    tokens: list[Sampled] = []
    for segment in segments:
        if isinstance(segment, int):
            text += "" if segment == TAGS["<|im_end|>"] else tokenizer.token_text(segment)
            tokens.append(Sampled(segment, len(text)))
            continue
        ids = segment_ids(segment)
        ends = _ends(ids, len(text))
        # What UTF-8 cannot hold was replaced: the text is what the ids say.
        text += tokenizer.decode(ids)
        tokens.extend(map(Sampled, ids, ends))
    return text, tuple(tokens)


def _ends(ids: Sequence[int], start: int) -> Iterator[int]:
    """Characters that are complete after each token: half a character is not yet text."""
    missing = 0
    for id in ids:
        for byte in default_tokenizer().token_bytes(id):
            if byte < 0x80:
                start += 1
            elif byte >= 0xC0:
                missing = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
            else:
                missing -= 1
                start += missing == 0
        yield start


def end_of(answer: Answer, truncation: Truncation, *, named: bool = False) -> End:
    """Where an answer ends under these limits. `named`: the request named the tool, which vLLM calls a plain stop."""
    tokens = answer.tokens

    def stopped(visible: int) -> str:
        called = any(span.kind == "header" and span.end <= visible for span in answer.spans)
        return "tool_calls" if called and not named else "stop"

    end = End(len(tokens), len(answer.text), stopped(len(answer.text)))
    if truncation.max_tokens is not None and truncation.max_tokens < end.tokens:
        end = End(truncation.max_tokens, tokens[truncation.max_tokens - 1].end, "length")
    for n, token in enumerate(tokens[: end.tokens]):
        if token.id in truncation.stop_token_ids:
            visible = tokens[n - 1].end if n else 0
            end = End(n + 1, visible, stopped(visible), token.id)
            break
    hits = [(at, word) for word in truncation.stop if (at := answer.text.find(word)) >= 0]
    for at, word in hits:
        count = next((n + 1 for n, token in enumerate(tokens) if token.end >= at + len(word)), len(tokens))
        if count < end.tokens or (count == end.tokens and at + len(word) <= end.visible and end.stop_reason is None):
            visible = at + len(word) if truncation.keep_stop else at
            end = End(count, visible, stopped(visible), word)
    return end


def pieces(answer: Answer, end: End, truncation: Truncation) -> Iterator[Piece]:
    """The answer in portions, each what one chunk of a stream carries."""
    tokens = answer.tokens[: end.tokens]
    hold = max((len(word) for word in truncation.stop), default=1) - 1 if not truncation.keep_stop else 0
    frontiers = [min(max(0, token.end - hold), end.visible) for token in tokens]
    frontiers[-1] = end.visible
    reader = _DeltaReader(answer)
    first = 0
    for last in _portions(answer, frontiers, truncation):
        piece = Piece(first, tokens[first:last])
        reader.advance(piece, frontiers[last - 1])
        if last == len(tokens):
            piece.end = end
        yield piece
        first = last


def _portions(answer: Answer, frontiers: Sequence[int], truncation: Truncation) -> Iterator[int]:
    """Ends of the portions. One portion never mixes kinds of text, unless a single token does."""
    chance = random.Random(truncation.seed)  # noqa: S311 - it only has to be the same for the same request
    kinds = list(_kinds(answer.spans, frontiers))
    at = 0
    while at < len(frontiers):
        size = (truncation.interval if at else 1) or (1 if chance.random() < 0.6 else chance.randint(2, 7))
        kind = kinds[at]
        last = at + 1
        while last < min(at + size, len(frontiers)):
            if kind and kinds[last] and kinds[last] != kind:
                break
            kind = kind or kinds[last]
            last += 1
        yield last
        at = last


def _kinds(spans: Sequence[Span], frontiers: Sequence[int]) -> Iterator[frozenset[Span]]:
    before, at = 0, 0
    for frontier in frontiers:
        while at < len(spans) and spans[at].end <= before:
            at += 1
        touched = set()
        for span in spans[at:]:
            if span.start >= frontier:
                break
            if max(before, span.start) < min(frontier, span.end):
                touched.add(span)
        yield frozenset(touched)
        before = max(before, frontier)


class _DeltaReader:
    """Turns progress over the text into deltas, as the parsers of vLLM do."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._sent = [span.start for span in answer.spans]
        self._at = 0

    def advance(self, piece: Piece, frontier: int) -> None:
        """Move the frontier and put what came into view into the piece."""
        spans = self._answer.spans
        for n in range(self._at, len(spans)):
            span = spans[n]
            if span.start >= frontier:
                break
            text = self._answer.text[self._sent[n] : min(frontier, span.end)]
            if span.kind == "arguments" and frontier < span.end:
                # Seen in recorded streams: blanks at the end of arguments wait for what follows them.
                text = text.rstrip()
            if text:
                self._sent[n] += len(text)
                _put(piece, span, text, self._answer.calls)
            if frontier >= span.end:
                self._at = n + 1


def _put(piece: Piece, span: Span, text: str, calls: Sequence[Call]) -> None:
    match span.kind:
        case "reasoning":
            piece.reasoning += text
        case "content":
            piece.content += text
        case "header":
            piece.calls.append(("header", span.call, calls[span.call].name))
        case "arguments":
            piece.calls.append(("arguments", span.call, text))
