"""What each engine can be asked for, and what is learnt when one refuses.

Where nothing is known, everything is asked for; an upstream that answers 400 and names a field we added is asked again
without it, and the lesson is kept for the endpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from rollcage.gateway.shapes import object_of
from rollcage.types import Endpoint, JsonObject

_OWNERS = {"vllm", "llamacpp", "sglang"}
"""Those who sign their list of models. `openai` is no signature: half the field copies it."""
_KINDS = {"openai", "hf_router", "vllm", "sglang", "llamacpp"}
_HOSTS = {"api.openai.com": "openai", "router.huggingface.co": "hf_router"}
HOSTED = frozenset({"openai", "hf_router"})
"""Services that run no engine of a version we could ask for."""
_MOST_ALTERNATIVES = {"openai": 20, "hf_router": 5}
_IDS_SINCE = (0, 10, 2)
"""The first vLLM with `return_token_ids`; older ones can at least spell tokens as ids."""


@dataclass(frozen=True)
class Wanted:
    """The traits of a request that decide what may be asked for beside it."""

    chat: bool
    stream: bool
    tools: bool
    alternatives: int
    """Candidates per token."""


@dataclass(frozen=True)
class Engine:
    """What is known of the engine behind an endpoint."""

    name: str = "unknown"
    version: tuple[int, ...] = ()
    refused: frozenset[str] = frozenset()
    """Fields it answered 400 to."""
    quiet: bool = False
    """Whether to ask it for nothing (mode `black_box`)."""

    @property
    def cap_field(self) -> str:
        """The name under which it takes the ceiling of a chat answer."""
        modern = self.name == "openai" or "max_tokens" in self.refused
        return "max_completion_tokens" if modern else "max_tokens"

    def asks(self, wanted: Wanted) -> JsonObject:
        """The fields that make it tell every token."""
        if self.quiet:
            return {}
        fields = self._logprobs(wanted) | self._ids(wanted)
        if wanted.stream:
            fields["stream_options"] = {"include_usage": True}
        refused = self.refused | ({"top_logprobs"} if "logprobs" in self.refused else frozenset())
        return {name: value for name, value in fields.items() if name not in refused}

    def without(self, name: str) -> Engine:
        """The same engine after it refused a field."""
        return replace(self, refused=self.refused | {name})

    def silenced(self) -> Engine:
        """The same engine, of which nothing is asked."""
        return replace(self, quiet=True)

    def _logprobs(self, wanted: Wanted) -> JsonObject:
        if self.name == "llamacpp" and wanted.chat and wanted.stream and wanted.tools:
            return {}  # it answers 400 to logprobs with tools in a stream
        most = min(wanted.alternatives, _MOST_ALTERNATIVES.get(self.name, wanted.alternatives))
        if self.name == "llamacpp":
            most = max(most, 1)  # its count of alternatives is also the switch
        return {"logprobs": True, "top_logprobs": most} if wanted.chat else {"logprobs": most}

    def _ids(self, wanted: Wanted) -> JsonObject:
        match self.name:
            case "vllm" if self.version and self.version < _IDS_SINCE:
                return {"return_tokens_as_token_ids": True}
            case "vllm" | "unknown":
                return {"return_token_ids": True}
            case "sglang" if wanted.chat and wanted.stream:
                return {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
            case "sglang":
                return {"return_token_ids": True, "return_prompt_token_ids": True}
            case _:
                return {}


class Known:
    """What was learnt of each endpoint's engine, for all rollouts that use it."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str], Engine] = {}

    def get(self, endpoint: Endpoint) -> Engine:
        """The engine behind an endpoint, as far as is known."""
        return self._engines.get((endpoint.base_url, endpoint.model)) or guess(endpoint)

    def found(self, endpoint: Endpoint, engine: Engine) -> None:
        """A probe told what it is; what it refused before is not forgotten."""
        self.learn(endpoint, replace(engine, refused=self.get(endpoint).refused | engine.refused))

    def learn(self, endpoint: Endpoint, engine: Engine) -> None:
        """Keep this for the next call."""
        self._engines[endpoint.base_url, endpoint.model] = replace(engine, quiet=False)


def guess(endpoint: Endpoint) -> Engine:
    """What the endpoint's address and catalog entry tell before anybody has asked it."""
    host = urlsplit(endpoint.base_url).hostname or ""
    return Engine(_HOSTS.get(host) or (endpoint.kind if endpoint.kind in _KINDS else "unknown"))


def engine_of(endpoint: Endpoint, models: bytes, version: bytes = b"") -> Engine:
    """What the endpoint's answers to `GET /v1/models` and `GET /version` tell."""
    found = guess(endpoint)
    listed = (object_of(models) or {}).get("data")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    own = [row for row in rows if row.get("id") == endpoint.model] or rows[:1]
    owner = str(own[0].get("owned_by", "")).lower() if own else ""
    if owner in _OWNERS:
        found = Engine(owner)
    said = (object_of(version) or {}).get("version")
    return replace(found, version=_numbers(said)) if isinstance(said, str) else found


def refused_field(answer: bytes, added: JsonObject) -> str | None:
    """The field among those we added that a 400 complains about; null where it complains about something else."""
    text = answer[:65536].decode("utf-8", "replace")
    named = [name for name in added if re.search(rf"\b{re.escape(name)}\b", text)]
    # An error that quotes the whole request names every field: then the ids go first, logprobs last.
    order = ("stream_options", "top_logprobs", "logprobs")
    return min(named, key=lambda name: order.index(name) if name in order else -1, default=None)


def wants_modern_cap(answer: bytes) -> bool:
    """Whether a 400 says that this model takes `max_completion_tokens` only."""
    text = answer[:65536].decode("utf-8", "replace").lower()
    return "max_completion_tokens" in text and ("unsupported" in text or "not supported" in text)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
