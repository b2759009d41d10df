"""The catalog of model endpoints: a shorthand or explicit fields in; one `Endpoint`, or an error that helps, out."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from pydantic import SecretStr

from rollcage.errors import UsageError
from rollcage.schema.endpoint import EndpointArguments
from rollcage.settings import EndpointSettings, Settings, variable
from rollcage.types import Endpoint, JsonObject, Sampling, ScriptedTurn, Task


class EndpointRequest(EndpointArguments):
    """Who should think, as a task file, a command or a rollout says it."""

    extra_body: JsonObject = {}
    """Further fields put into every request as they are."""


class Default(NamedTuple):
    """What the catalog knows about a kind."""

    base_url: str = ""
    api_key: str = ""
    model: str = ""
    thinking: bool | None = None


CATALOG = {
    "vllm": Default(api_key="intercepted", model="Qwen/Qwen3.5-4B", thinking=False),
    "openai": Default("https://api.openai.com/v1", model="gpt-4o-mini"),
    "hf_router": Default("https://router.huggingface.co/v1", model="Qwen/Qwen3-4B-Instruct-2507:nscale"),
    "local": Default(),
    "custom": Default(),
    "scripted": Default(),
}
"""What is known of every kind in `KINDS`."""

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
        base_url=_address(fields.text("base_url"), fields.wrong("base_url")),
        model=_name(fields.text("model"), fields.wrong("model")),
        key=SecretStr(_key(fields.text("api_key"), fields.wrong("api_key"))),
        kind=kind,
        sampling=sampling,
    )


@asynccontextmanager
async def opened(request: EndpointRequest, settings: Settings, task: Task) -> AsyncIterator[Endpoint]:
    """The endpoint for one task; where that is the scripted model, it runs as long as the block does."""
    if kind_of(request, task) != "scripted":
        yield resolve(request, settings, task)
        return
    from rollcage.simulators import ScriptedModel

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
            raise UsageError(
                f"unknown kind {request.endpoint!r}",
                argument="endpoint",
                remedy=f"{hint}known are {', '.join(CATALOG)}",
            )
        if implied and implied[0] != kind:
            raise UsageError(
                f"is {kind!r}",
                argument="endpoint",
                remedy=f"{{{implied[1]}}} means {implied[0]!r}: give one of the two",
            )
        return kind
    if implied:
        return implied[0]
    if request.base_url:
        return "custom"
    if task is not None and task.solution and not request.names_something:
        return "scripted"
    raise UsageError(
        "no model endpoint is named",
        argument="endpoint",
        remedy="give {endpoint} (vllm, openai, hf_router, local, scripted) or {base_url} with {api_key} and {model}",
    )


def named_model(text: str) -> dict[str, str]:
    """The arguments that a model's name in one word means: `vllm`, `openai/gpt-4o-mini`, `https://host/v1#model`.

    The part before the first slash is a kind of the catalog, the rest the model's name there. After an address, `#`
    begins the model's name, and no key is sent unless one is given.
    """
    text = text.strip()
    if re.match(r"https?://", text):
        address, _, model = text.partition("#")
        if not model:
            raise UsageError(
                f"{text!r} does not say which model", argument="model", remedy=f"write {address}#NAME-OF-THE-MODEL"
            )
        return {"base_url": address, "model": model, "api_key": "none"}
    kind, _, model = text.partition("/")
    kind = kind.lower().replace("-", "_")
    if kind not in CATALOG or kind == "custom":
        known = ", ".join(name for name in CATALOG if name != "custom")
        raise UsageError(
            f"{text!r} names no endpoint",
            argument="model",
            remedy=f"begin with one of {known}, as in openai/gpt-4o-mini, or give an address: http://host/v1#model",
        )
    return {"endpoint": kind, **({"model": model} if model else {})}


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
            raise UsageError(
                f"means {kind!r}",
                argument=argument,
                remedy=f"{{{found[0][1]}}} means {found[0][0]!r}: give one of the two",
            )
    return found[0] if found else None


def _model_key(text: str) -> tuple[str, str]:
    scheme, separator, name = text.strip().partition("://")
    if separator and name and scheme in ("vllm", "hf-router"):
        return scheme, name
    raise UsageError(f"{text!r} is neither vllm://<repo> nor hf-router://<repo>:<provider>", argument="model_key")


Wrong = Callable[[str, str], UsageError]
"""Makes the error for a value out of a message and a remedy."""


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
        raise self._missing(field)

    def wrong(self, field: str) -> Wrong:
        """The error that this field's value is wrong: it names the argument or the variable that gave it."""
        if self._set[field].strip() and not (self._given[field] + self._older[field]).strip():
            name = variable(self._kind, field)
            return lambda message, remedy: UsageError(f"{name}: {message}", remedy=remedy)
        older = self._older[field].strip() and not self._given[field].strip()
        argument = self._older_names[field] if older else field
        return lambda message, remedy: UsageError(message, argument=argument, remedy=remedy)

    def _missing(self, field: str) -> UsageError:
        given = f"give {{{field}}}"
        if (self._kind, field) in (("vllm", "base_url"), ("hf_router", "api_key")):
            given += f" or {{{self._older_names[field]}}}"
        remedy = f"{given} or set {variable(self._kind, field)}" if self._kind != "custom" else given
        if self._kind == "custom":
            extra = " (any word where the server asks for none)" if field == "api_key" else ""
            remedy += f"{extra}, or set {variable('local', field)} and give {{endpoint}} local"
        return UsageError(f"endpoint {self._kind!r} has no {field}", argument=field, remedy=remedy)


def _address(url: str, wrong: Wrong) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise wrong(f"{url!r} is no address: {error}", "") from error
    if parts.username or parts.password:
        # The address is shown and logged, so it must not carry what api_key keeps secret.
        raise wrong("an address must not carry a user or password", "give the key as {api_key}")
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise wrong(f"{url!r} is no address", "it looks like http://127.0.0.1:8000/v1")
    if parts.query or parts.fragment:
        raise wrong(f"{url!r} has a query or a fragment", "give the address up to /v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    # A path that names a version already (…/v1, …/v4, …/v1beta/openai) is complete as it is.
    if not re.search(r"/v\d+(alpha|beta)?\d*(/|$)", path):
        path += "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def _name(model: str, wrong: Wrong) -> str:
    if not model.isprintable():
        raise wrong(f"{model!r} is no model name: it has control characters", "")
    return model


def _key(key: str, wrong: Wrong) -> str:
    # It goes into an HTTP header as it is.
    if not (key.isascii() and key.isprintable()):
        raise wrong("the key has characters that no HTTP header can carry", "copy it again")
    return key


def _thinking(request: EndpointRequest, default: Default) -> bool | None:
    """What the chat template is told of thinking; None: nothing."""
    if request.disable_thinking is not None:
        if request.thinking is not None and request.thinking == request.disable_thinking:
            raise UsageError(
                "they contradict each other", argument="thinking", remedy="give {thinking} or {disable_thinking}"
            )
        # To disable it is to say something; not to disable it is not.
        return False if request.disable_thinking else request.thinking
    if request.thinking is not None:
        return request.thinking
    return False if request.model_key else default.thinking


def _sampling(request: EndpointRequest, default: Default) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        seed=request.seed,
        top_logprobs=request.top_logprobs,
        thinking=_thinking(request, default),
        history=request.history,
        keep_reasoning=request.keep_reasoning,
        extra_body=request.extra_body,
    )


def _scripted(request: EndpointRequest, task: Task | None, scripted: Scripted | None) -> Endpoint:
    if request.base_url or request.model:
        field = "base_url" if request.base_url else "model"
        raise UsageError(
            "means nothing to the endpoint 'scripted', which runs no model", argument=field, remedy="leave it out"
        )
    if scripted is None:
        raise not_offered()
    return scripted(task.solution if task is not None and task.solution else NEUTRAL_SCRIPT)


def not_offered() -> UsageError:
    """What is said where nothing runs the scripted model."""
    return UsageError("'scripted' is not offered here", argument="endpoint", remedy="name another one")


def named_address(request: EndpointRequest) -> str:
    """The address that the caller named; empty where it left that to us."""
    return request.base_url.strip() or request.vllm_url.strip()


def resolve_for_caller(
    request: EndpointRequest, settings: Settings, task: Task, *, scripted: Scripted, allowed: Sequence[str] = ()
) -> Endpoint:
    """As `resolve`, for somebody who is not us: a key of ours goes only to the address that our own settings name.

    `allowed`: see `check_address`.
    """
    if not named_address(request):
        return resolve(request, settings, task, scripted=scripted)
    kind = kind_of(request, task)
    ours = settings.endpoints.get(kind, EndpointSettings())
    bare = {**settings.endpoints, kind: ours.model_copy(update={"api_key": SecretStr("")})}
    try:
        endpoint = resolve(request, settings.model_copy(update={"endpoints": bare}), task, scripted=scripted)
    except UsageError as error:
        theirs = request.api_key.get_secret_value() or request.hf_token.get_secret_value()
        if error.argument != "api_key" or theirs or not ours.api_key.get_secret_value():
            raise
        raise UsageError(
            "is missing",
            argument="api_key",
            remedy="the server's own key goes only to the server's own address, so give yours",
        ) from None
    check_address(endpoint.base_url, allowed)
    return endpoint


def check_address(url: str, allowed: Sequence[str]) -> None:
    """Refuse an address that lies below none of the allowed ones (`https://host[:port][/path]`); none allows all."""
    if allowed and not any(_below(url, each) for each in allowed):
        raise UsageError(
            "this server does not call that address", argument="base_url", remedy="ask its operator to allow it"
        )


def _below(url: str, allowed: str) -> bool:
    here, there = urlsplit(url), urlsplit(allowed)
    path = there.path.rstrip("/")
    if ".." in here.path.split("/") or "%" in here.path:
        return False
    return _origin(here) == _origin(there) and (here.path == path or here.path.startswith(path + "/"))


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
