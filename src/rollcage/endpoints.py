"""The catalog of model endpoints: a shorthand or explicit fields in; one `Endpoint`, or an error that helps, out."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, SecretStr

from rollcage.errors import UsageError
from rollcage.settings import EndpointSettings, Settings, variable
from rollcage.types import Endpoint, JsonObject, Sampling, ScriptedTurn, Task, Value


class EndpointRequest(Value):
    """Who should think, as a caller says it: both published shapes, every field optional."""

    endpoint: str = ""
    """Shorthand: `vllm`, `openai`, `hf_router`, `local`, `scripted`, `custom`."""
    base_url: str = ""
    """The model's address."""
    api_key: SecretStr = SecretStr("")
    """The real key; it never enters a box."""
    model: str = ""
    """The model's name at that address."""
    model_key: str = ""
    """Older shape: `vllm://<repo>` or `hf-router://<repo>:<provider>`."""
    vllm_url: str = ""
    """Goes with `model_key = "vllm://..."`."""
    hf_token: SecretStr = SecretStr("")
    """Goes with `model_key = "hf-router://..."`."""
    thinking: bool | None = None
    """Older shape: false means that thinking is disabled."""
    disable_thinking: bool | None = None
    """True: the chat template is told not to think; null: the endpoint's own default."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature."""
    seed: int | None = None
    """Sampling seed."""
    top_logprobs: int = Field(default=5, ge=0, le=20)
    """Alternatives asked for per token."""
    extra_body: JsonObject = {}
    """Further fields put into every request as they are."""

    @property
    def names_something(self) -> bool:
        """Whether the caller says anything about who should think."""
        secrets = self.api_key.get_secret_value() or self.hf_token.get_secret_value()
        return bool(self.endpoint or self.base_url or self.model or self.model_key or self.vllm_url or secrets)


class Default(NamedTuple):
    """What the catalog knows about a kind."""

    about: str
    base_url: str = ""
    api_key: str = ""
    model: str = ""
    thinking: bool | None = None


CATALOG = {
    "vllm": Default("a vLLM server", api_key="intercepted", model="Qwen/Qwen3.5-4B", thinking=False),
    "openai": Default("OpenAI", "https://api.openai.com/v1", model="gpt-4o-mini"),
    "hf_router": Default(
        "the Hugging Face router", "https://router.huggingface.co/v1", model="Qwen/Qwen3-4B-Instruct-2507:nscale"
    ),
    "local": Default("whatever ROLLCAGE_BASE_URL, ROLLCAGE_API_KEY and ROLLCAGE_MODEL name"),
    "custom": Default("an address given in full: base_url, api_key and model"),
    "scripted": Default("no model: answers come from the task's own script"),
}
"""Every kind of endpoint there is."""

NEUTRAL_SCRIPT = (ScriptedTurn(text="This is the scripted model: the task brings no solution, so nothing was done."),)
"""What the scripted model says where a task has no script for it."""

Scripted = Callable[[Sequence[ScriptedTurn]], Endpoint]
"""Lends the address of a running scripted model that answers from these turns: `ScriptedModel.endpoint`."""


def resolve(
    request: EndpointRequest, settings: Settings, task: Task | None = None, *, scripted: Scripted | None = None
) -> Endpoint:
    """One endpoint, field by field: what the caller gave, then the variable, then the catalog's default.

    Raises UsageError where a field is missing or makes no sense, before anything is started.
    """
    kind = kind_of(request, task)
    sampling = _sampling(request, CATALOG[kind])
    if kind == "scripted":
        return _scripted(request, task, scripted).model_copy(update={"kind": "scripted", "sampling": sampling})
    fields = _Fields(kind, request, settings.endpoints.get(kind, EndpointSettings()))
    return Endpoint(
        base_url=_address(fields.text("base_url"), fields.origin("base_url")),
        model=_name(fields.text("model"), fields.origin("model")),
        key=SecretStr(_key(fields.text("api_key"), fields.origin("api_key"))),
        kind=kind,
        sampling=sampling,
    )


@asynccontextmanager
async def opened(request: EndpointRequest, settings: Settings, task: Task) -> AsyncIterator[Endpoint]:
    """The endpoint for one task; where that is the scripted model, it runs as long as the block does."""
    if kind_of(request, task) != "scripted":
        yield resolve(request, settings, task)
        return
    from rollcage.testing import ScriptedModel

    async with ScriptedModel() as model:
        yield resolve(request, settings, task, scripted=model.endpoint)


def kind_of(request: EndpointRequest, task: Task | None = None) -> str:
    """The catalog entry this request means; a task with a solution and no word about a model means `scripted`."""
    implied = _implied(request)
    if request.endpoint:
        kind = request.endpoint.strip().lower().replace("-", "_")
        if kind not in CATALOG:
            near = get_close_matches(kind, CATALOG, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"endpoint: unknown kind {request.endpoint!r}; {hint}known are {', '.join(CATALOG)}")
        if implied and implied[0] != kind:
            raise UsageError(f"endpoint is {kind!r} but {implied[1]} means {implied[0]!r}; give one of the two")
        return kind
    if implied:
        return implied[0]
    if request.base_url:
        return "custom"
    if task is not None and task.solution and not request.names_something:
        return "scripted"
    raise UsageError(
        "no model endpoint is named; give --endpoint (vllm, openai, hf_router, local, scripted) "
        "or --base-url with --api-key and --model"
    )


def _implied(request: EndpointRequest) -> tuple[str, str] | None:
    """What the older shape's arguments mean, and which of them says so."""
    found: list[tuple[str, str]] = []
    if request.model_key:
        found.append(("vllm" if _model_key(request.model_key)[0] == "vllm" else "hf_router", "model_key"))
    if request.vllm_url:
        found.append(("vllm", "vllm_url"))
    if request.hf_token.get_secret_value():
        found.append(("hf_router", "hf_token"))
    for kind, argument in found[1:]:
        if kind != found[0][0]:
            raise UsageError(f"{found[0][1]} means {found[0][0]!r} but {argument} means {kind!r}; give one of the two")
    return found[0] if found else None


def _model_key(text: str) -> tuple[str, str]:
    scheme, separator, name = text.strip().partition("://")
    if separator and name and scheme in ("vllm", "hf-router"):
        return scheme, name
    raise UsageError(f"model_key: {text!r} is neither vllm://<repo> nor hf-router://<repo>:<provider>")


class _Fields:
    """Picks each field of one endpoint, and remembers where it came from."""

    def __init__(self, kind: str, request: EndpointRequest, environment: EndpointSettings) -> None:
        self._kind = kind
        older = {"base_url": "", "api_key": "", "model": ""}
        self._older_names = {"base_url": "vllm_url", "api_key": "hf_token", "model": "model_key"}
        if kind == "vllm":
            older["base_url"] = request.vllm_url
        elif kind == "hf_router":
            older["api_key"] = request.hf_token.get_secret_value()
        if request.model_key:
            older["model"] = _model_key(request.model_key)[1]
        self._older = older
        self._given = {
            "base_url": request.base_url,
            "api_key": request.api_key.get_secret_value(),
            "model": request.model,
        }
        self._set = {
            "base_url": environment.base_url,
            "api_key": environment.api_key.get_secret_value(),
            "model": environment.model,
        }

    def text(self, field: str) -> str:
        default: str = getattr(CATALOG[self._kind], field)
        for source in (self._given[field], self._older[field], self._set[field], default):
            if source.strip():
                return source.strip()
        raise UsageError(self._missing(field))

    def origin(self, field: str) -> str:
        """The argument or the variable that gave this field, for messages about its value."""
        if self._given[field].strip():
            return field
        if self._older[field].strip():
            return self._older_names[field]
        return variable(self._kind, field) if self._set[field].strip() else field

    def _missing(self, field: str) -> str:
        option = "--" + field.replace("_", "-")
        what = {"base_url": "address", "api_key": "key", "model": "model"}[field]
        if self._kind == "custom":
            extra = " (any word where the server asks for none)" if field == "api_key" else ""
            return (
                f"endpoint 'custom' has no {what}: {field} is missing; give {option}{extra}, "
                f"or set {variable('local', field)} and use --endpoint local"
            )
        older = ""
        if (self._kind, field) in (("vllm", "base_url"), ("hf_router", "api_key")):
            older = f" or {self._older_names[field]}"
        return (
            f"endpoint {self._kind!r} has no {what}: {field}{older} is missing; "
            f"give {option} or set {variable(self._kind, field)}"
        )


def _address(url: str, origin: str) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{origin}: {url!r} is no address: {error}") from error
    if parts.username or parts.password:
        # The address is shown and logged, so it must not carry what api_key keeps secret.
        raise UsageError(f"{origin}: an address must not carry a user or password; give the key as api_key")
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise UsageError(f"{origin}: {url!r} is no address; it looks like http://127.0.0.1:8000/v1")
    if parts.query or parts.fragment:
        raise UsageError(f"{origin}: {url!r} has a query or a fragment; give the address up to /v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    # A path that names a version already (…/v1, …/v4, …/v1beta/openai) is complete as it is.
    if not re.search(r"/v\d+(alpha|beta)?\d*(/|$)", path):
        path += "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def _name(model: str, origin: str) -> str:
    if not model.isprintable():
        raise UsageError(f"{origin}: {model!r} is no model name: it has control characters")
    return model


def _key(key: str, origin: str) -> str:
    # It goes into an HTTP header as it is.
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{origin}: the key has characters that no HTTP header can carry; copy it again")
    return key


def _sampling(request: EndpointRequest, default: Default) -> Sampling:
    thinking = default.thinking
    if request.disable_thinking is not None:
        thinking = not request.disable_thinking
        if request.thinking is not None and request.thinking != thinking:
            raise UsageError("thinking and disable_thinking contradict each other; give one of the two")
    elif request.thinking is not None:
        thinking = request.thinking
    return Sampling(
        temperature=request.temperature,
        seed=request.seed,
        top_logprobs=request.top_logprobs,
        thinking=thinking,
        extra_body=request.extra_body,
    )


def _scripted(request: EndpointRequest, task: Task | None, scripted: Scripted | None) -> Endpoint:
    if request.base_url or request.model:
        field = "base_url" if request.base_url else "model"
        raise UsageError(f"endpoint 'scripted' runs no model, so {field} means nothing there; leave one of the two out")
    if scripted is None:
        raise UsageError("endpoint 'scripted' is not offered here; name another one")
    return scripted(task.solution if task is not None and task.solution else NEUTRAL_SCRIPT)
