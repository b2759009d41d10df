"""One call to the model as the engine counted it: its tokens, its purpose, its history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

from rollcage.types.base import JsonObject, Value
from rollcage.types.tokens import AsTokens, Token


class Purpose(StrEnum):
    """What the agent made a model call for; trainers leave out what is not the policy."""

    AGENT = "agent"
    TITLE = "title"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"


POLICY = frozenset({Purpose.AGENT, Purpose.SUBAGENT})
"""What is trained unless more is asked for: titles and summaries are not what the policy is for."""


class CallOrigin(NamedTuple):
    """Who made a model call, and what for."""

    purpose: Purpose = Purpose.AGENT
    session: str = ""
    """The agent's own name for the conversation; empty where it tells none."""
    parent_session: str = ""
    """The conversation that started it, for subagents."""


CallClassifier = Callable[[Mapping[str, str], JsonObject], CallOrigin]
"""Tells the origin of a call by its headers (names in lower case) and its body (as one of chat completions)."""


SAMPLING_FIELDS = (
    "temperature top_p top_k min_p typical_p presence_penalty frequency_penalty repetition_penalty repeat_penalty "
    "logit_bias seed"
).split()
"""Fields of a request that change what is sampled, by the names engines have for them."""


class TurnHistory(Value):
    """What became of `history = "exact"` in one turn."""

    exact: bool = False
    """Whether the prompt begins with an earlier turn's own ids, its prompt and its answer."""
    reason: str = ""
    """Why not, where not: then the prompt is what the engine's template made of the messages."""
    turn: int | None = None
    """That earlier turn's index."""
    kept: int = 0
    """How many ids of it the prompt begins with. An end token that follows them was put in, where it was cut."""
    rendered: int = 0
    """How many ids the template would have made of the messages."""
    differs_at: int | None = None
    """Where the template's ids would have been others for the first time; None: nowhere."""
    changed: tuple[str, ...] = ()
    """What of that turn's answer the agent sent back in other words: `content`, `arguments`, `reasoning`."""


class Turn(Value):
    """One model call: what was sent, what came back, token by token."""

    index: int
    """Order of arrival within the rollout, from 0."""
    replaces: int | None = None
    """The broken attempt that this call repeats, by its index: the agent went on as if that one had never been."""
    purpose: Purpose = Purpose.AGENT
    """What the agent made this call for."""
    session: str = ""
    """The agent's own session id, where it sends one."""
    parent_session: str = ""
    """The session that started this one (subagents)."""
    policy_version: str = ""
    """The weights that were asked, as the caller names them; stamped when the call begins."""
    request: JsonObject
    """The request body exactly as it was sent upstream, but for the ids of an exact prompt, which are `prompt_ids`. Of
    a call that failed, after too many bytes of such, only `not_kept`: size, SHA-256 and beginning."""
    message: JsonObject = {}
    """The assistant message, assembled from the answer."""
    prompt_ids: tuple[int, ...] = ()
    """The engine's own ids of the whole prompt; empty where the engine does not tell."""
    tokens: Annotated[Sequence[Token], AsTokens] = ()
    """Every sampled token in order, the end token included."""
    finish_reason: str | None = None
    """Why generation ended; None for a turn that was cut."""
    usage: JsonObject = {}
    """The engine's own count."""
    status: int = 0
    """HTTP status of the upstream's answer; 0 where none came."""
    error: str | None = None
    """What broke, in one line; None for a whole turn."""
    trainable: bool = False
    """Ids and logprobs are complete and agree with the engine's own count."""
    untrainable_reason: str = ""
    """Why not, where not."""
    recorded: bool = False
    """Whether this answer was given before, to the rollout that this one is a replay or a fork of."""
    history: TurnHistory | None = None
    """How the prompt was made, with `history = "exact"`; None without."""
    streamed: bool = True
    """Whether the agent got this turn as a stream."""
    started_at: float = 0.0
    """Unix time at which the agent's request had arrived."""
    first_token_s: float | None = None
    """Seconds until the first token of the answer."""
    seconds: float = 0.0
    """Seconds from the agent's request to the end of the answer."""

    @property
    def sampling(self) -> JsonObject:
        """How the engine was told to sample, by the request that it got; what is not named was left to the engine.

        `logprobs_mode`: `processed` where the request asked for logprobs after temperature and filters, else
        `engine_default`; the two differ only where sampling is not plain.
        """
        told = {name: self.request[name] for name in SAMPLING_FIELDS if self.request.get(name) is not None}
        mode = "processed" if self.request.get("post_sampling_probs") is True else "engine_default"
        return {**told, "logprobs_mode": mode}


KEY_REPEATED = "the answer repeats a key, which is not kept"
"""Why a turn with a secret in it cannot be trained on."""
