"""What each engine can be asked for, how it is known, and what is learnt when one refuses.

Where nothing is known, everything is asked for; an upstream that answers 400 and names a field we added is asked again
without it (or without a stream, where that is what it minds), and the lesson is kept for the endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple
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
_WHOLE_SINCE = (0, 13)
"""The first vLLM whose streams lose no tokens that its parsers swallow."""
_PROMPTS_SINCE = (0, 32)
"""The first vLLM that takes a chat's prompt as ids and checks them."""
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "openai": "OpenAI", "hf_router": "HF router"}
_REMEMBERED = 1024
"""Endpoints that are remembered. Keys come and go with rollouts, and each key is another endpoint."""


class CallShape(NamedTuple):
    """The traits of a request that decide what may be asked for beside it."""

    chat: bool
    stream: bool
    tools: bool
    alternatives: int
    """Candidates per token."""
    echo: bool = False
    """Whether the prompt is to be repeated in the answer."""


@dataclass(frozen=True)
class Engine:
    """What is known of the engine behind an endpoint."""

    name: str = "unknown"
    version: tuple[int, ...] = ()
    refused: frozenset[str] = frozenset()
    """Fields it answered 400 to; `stream` among them means that it tells more without one."""
    quiet: bool = False
    """Whether to ask it for nothing (mode `black_box`)."""

    @property
    def cap_field(self) -> str:
        """The name under which it takes the ceiling of a chat answer."""
        modern = self.name == "openai" or "max_tokens" in self.refused
        return "max_completion_tokens" if modern else "max_tokens"

    @lru_cache(maxsize=256)  # noqa: B019 - an engine is a small value, and equal ones are one
    def asks(self, wanted: CallShape) -> JsonObject:
        """The fields that make it tell every token. Look, do not touch."""
        if self.quiet:
            return {}
        fields = self._logprobs(wanted) | self._ids(wanted)
        if wanted.stream:
            fields["stream_options"] = {"include_usage": True}
        refused = self.refused | ({"top_logprobs"} if "logprobs" in self.refused else frozenset())
        return {name: value for name, value in fields.items() if name not in refused}

    def unstreams(self, wanted: CallShape) -> bool:
        """Whether a stream is better asked for as a whole, because the engine tells all its tokens only then."""
        if self.quiet or not wanted.stream:
            return False
        match self.name:
            case _ if "stream" in self.refused:
                return True
            case "sglang":
                return True
            case "llamacpp":
                # Its streams have no entry for the end token nor for what a parser swallows, and no logprobs at all
                # beside tools.
                return wanted.chat
            case "vllm":
                return wanted.chat and wanted.tools and _IDS_SINCE <= self.version < _WHOLE_SINCE
            case _:
                return False

    @property
    def prompt_field(self) -> str:
        """The field in which it takes a chat's prompt as ids; empty where it takes none."""
        fields = {"vllm": "kv_transfer_params" if self.version >= _PROMPTS_SINCE else "", "sglang": "input_ids"}
        field = "" if self.quiet else fields.get(self.name, "")
        return "" if field in self.refused else field

    def prompted(self, ids: list[int]) -> JsonObject:
        """What to put into a chat request to give its prompt as ids."""
        field = self.prompt_field
        return {field: {"prompt_token_ids": ids} if field == "kv_transfer_params" else ids}

    @property
    def tells_template(self) -> bool:
        """Whether it can be asked what prompt it makes of messages, having told no prompt ids."""
        return self.name == "llamacpp" and not self.quiet

    @property
    def hides_with_reasoning(self) -> bool:
        """Whether, told to leave out its reasoning, it leaves out ids and logprobs too."""
        return self.name in ("vllm", "unknown") and not self.quiet

    @property
    def advice(self) -> str:
        """Why it may not tell all, and what would; empty where nothing is known to be amiss."""
        spelled = f"{_NAMES.get(self.name, self.name)} {'.'.join(map(str, self.version))}".strip()
        if self.name == "vllm" and self.version:
            if self.version < _IDS_SINCE:
                return f"{spelled} cannot tell them all, 0.13 and later can"
            if self.version < _WHOLE_SINCE:
                return f"{spelled} drops tokens of a stream that its parsers swallow, 0.13 and later do not"
        return f"{spelled} tells no token ids" if self.name in HOSTED else ""

    def without(self, name: str) -> Engine:
        """The same engine after it refused a field."""
        return replace(self, refused=self.refused | {name})

    def silenced(self) -> Engine:
        """The same engine, of which nothing is asked."""
        return replace(self, quiet=True)

    def _logprobs(self, wanted: CallShape) -> JsonObject:
        most = min(wanted.alternatives, _MOST_ALTERNATIVES.get(self.name, wanted.alternatives))
        if self.name == "llamacpp":
            most = max(most, 1)  # its count of alternatives is also the switch
        return {"logprobs": True, "top_logprobs": most} if wanted.chat else {"logprobs": most}

    def _ids(self, wanted: CallShape) -> JsonObject:
        match self.name:
            case "vllm" if self.version and self.version < _IDS_SINCE:
                return {"return_tokens_as_token_ids": True}
            case "vllm" | "unknown" if wanted.echo:
                return {}  # the two exclude each other
            case "vllm" | "unknown":
                return {"return_token_ids": True}
            case "sglang":
                return {"return_token_ids": True, "return_prompt_token_ids": True}
            case "llamacpp" if wanted.chat and not wanted.stream:
                # Its logprobs have no entry for a token that ends inside a character; its verbose answer has all ids.
                return {"return_tokens": True, "verbose": True}
            case _:
                return {}


class KnownEngines:
    """What was learnt of each endpoint's engine, for all rollouts that use it."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str, str], Engine] = {}

    def get(self, endpoint: Endpoint) -> Engine:
        """The engine behind an endpoint, as far as is known."""
        return self._engines.get(_name(endpoint)) or guess(endpoint)

    def found(self, endpoint: Endpoint, engine: Engine) -> None:
        """A probe told what it is. What it refused before is not forgotten, nor what it will not tell this time."""
        before = self.get(endpoint)
        if engine.name == "unknown" or (engine.name == before.name and not engine.version):
            engine = replace(before, refused=engine.refused)
        self.learn(endpoint, replace(engine, refused=before.refused | engine.refused))

    def learn(self, endpoint: Endpoint, engine: Engine) -> None:
        """Keep this for the next call."""
        name = _name(endpoint)
        self._engines.pop(name, None)
        self._engines[name] = replace(engine, quiet=False)
        if len(self._engines) > _REMEMBERED:
            del self._engines[next(iter(self._engines))]


class ProbeAnswer(NamedTuple):
    """A server's answer to one question about itself."""

    status: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = {}
    """Names in lower case."""

    @property
    def value(self) -> JsonObject:
        """The body of a good answer; empty where it is not good."""
        return (object_of(self.body) or {}) if self.status == 200 else {}


def guess(endpoint: Endpoint) -> Engine:
    """What the endpoint's address and catalog entry tell before anybody has asked it."""
    host = urlsplit(endpoint.base_url).hostname or ""
    return Engine(_HOSTS.get(host) or (endpoint.kind if endpoint.kind in _KINDS else "unknown"))


def signed(endpoint: Endpoint, models: ProbeAnswer) -> str:
    """Whose signature the answer to `GET /v1/models` bears; what `guess` says where it bears none."""
    listed = models.value.get("data")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    own = [row for row in rows if row.get("id") == endpoint.model] or rows[:1]
    owner = str(own[0].get("owned_by", "")).lower() if own else ""
    if owner in _OWNERS:
        return owner
    server = models.headers.get("server", "").lower()
    return "llamacpp" if server.startswith("llama.cpp") else guess(endpoint).name


QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("/version",),
    "sglang": ("/server_info",),
    "llamacpp": ("/props",),
    "unknown": ("/version", "/props", "/get_model_info"),
}
"""What to ask besides, by what the list of models told: paths beside `/v1`."""


def engine_of(name: str, said: Mapping[str, ProbeAnswer]) -> Engine:
    """What a server is, by its signature and its answers to the `QUESTIONS`."""
    props, info = said.get("/props", ProbeAnswer()).value, said.get("/get_model_info", ProbeAnswer()).value
    if name == "unknown" and "default_generation_settings" in props:
        name = "llamacpp"
    elif name == "unknown" and "model_path" in info:
        name = "sglang"
    versions = [said.get(path, ProbeAnswer()).value.get("version") for path in ("/version", "/server_info")]
    version = next((each for each in versions if isinstance(each, str)), None)
    # A number alone is nobody's signature, but it tells the version of who has signed.
    return Engine(name, _numbers(version)) if version and name in ("vllm", "sglang") else Engine(name)


def refused_field(answer: bytes, added: JsonObject) -> str | None:
    """The field among those we added that a 400 complains about; None where it complains about something else."""
    text = answer[:65536].decode("utf-8", "replace")
    named = [name for name in added if re.search(rf"\b{re.escape(name)}\b", text)]
    # An error that quotes the whole request names every field: then the ids go first, logprobs last.
    order = ("stream_options", "top_logprobs", "logprobs")
    return min(named, key=lambda name: order.index(name) if name in order else -1, default=None)


def rejects_stream(answer: bytes) -> bool:
    """Whether a 400 complains of a field beside a stream, and not of the field itself."""
    return re.search(rb"\bstream", answer[:65536].replace(b"stream_options", b"")) is not None


def wants_modern_cap(answer: bytes) -> bool:
    """Whether a 400 says that this model takes `max_completion_tokens` only."""
    text = answer[:65536].decode("utf-8", "replace").lower()
    return "max_completion_tokens" in text and ("unsupported" in text or "not supported" in text)


def _name(endpoint: Endpoint) -> tuple[str, str, str]:
    return endpoint.base_url, endpoint.model, endpoint.key.get_secret_value()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
