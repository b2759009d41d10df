"""The arguments of a rollout, in both published shapes, and what they mean. Pure: nothing is started here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, SecretStr, ValidationError, model_validator

from rollcage.endpoints import EndpointRequest, Scripted, kind_of, resolve
from rollcage.errors import UsageError
from rollcage.settings import Settings
from rollcage.types import HOME, AgentSpec, Endpoint, Job, Limits, SandboxSpec, ScriptedCall, ScriptedTurn, Task, Value

PUBLISHED_TEMPLATE = "opencode-rl"
"""The image that users of the published environment build and name."""
SECRETS = ("api_key", "hf_token")
"""Arguments whose values are never stored, logged or said again."""
_NOT_GIVEN = frozenset(
    "endpoint base_url api_key model model_key vllm_url hf_token setup setup_shell "
    "upload_files verify test_script tests task_id template environment verifier idempotency_key".split()
)
"""Arguments for which null means the default."""


class BadArgument(UsageError):
    """An argument that cannot be; `argument` names it, the message says what to do."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(message)
        self.argument = argument


class RolloutRequest(Value):
    """One rollout, as callers ask for it. Every argument is optional but `instruction`."""

    instruction: str
    """The prompt for the agent, handed over verbatim."""
    endpoint: str = ""
    """Who thinks, in a word: `vllm`, `openai`, `hf_router`, `local`, `scripted`, or `custom` with `base_url`."""
    base_url: str = ""
    """The model's address; wins over the shorthand's. The server's own keys are never sent to it."""
    api_key: SecretStr = SecretStr("")
    """The model's key. It never enters the box, and is never stored or logged."""
    model: str = ""
    """The model's name at that address."""
    model_key: str = ""
    """Older shape: `vllm://<repo>` (needs `vllm_url`) or `hf-router://<repo>:<provider>` (needs `hf_token`)."""
    vllm_url: str = ""
    """Goes with `model_key = "vllm://..."`."""
    hf_token: SecretStr = SecretStr("")
    """Goes with `model_key = "hf-router://..."`. Never stored or logged."""
    thinking: bool | None = None
    """Older shape: false means that thinking is disabled."""
    disable_thinking: bool | None = None
    """True: the chat template is told not to think; null: the endpoint's own default."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    """Sampling temperature."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Sampling seed."""
    top_logprobs: int = Field(default=5, ge=0, le=20)
    """Alternatives asked for per token."""
    setup: tuple[str, ...] = ()
    """Bash commands run before the agent; the first that fails ends the rollout."""
    setup_shell: str = ""
    """Older shape: one setup script, run after `setup`."""
    upload_files: dict[str, str] = {}
    """`{path in the box: text}`, staged before setup; a relative path is relative to the workdir."""
    verify: tuple[str, ...] = ()
    """Bash commands run after the agent is gone."""
    test_script: str = ""
    """Older shape: one bash verifier, staged after the agent; it writes its reward to `$REWARD_FILE`."""
    tests: dict[str, str] = {}
    """`{path: text}`, staged in `$TESTS_DIR` only after the agent is gone."""
    verify_in: Literal["box", "fresh"] = "box"
    """`box`: the same box put back as setup left it, but for the workdir; `fresh`: a new one."""
    workdir: str = f"{HOME}/workdir"
    """Where the agent starts."""
    solution: tuple[ScriptedTurn, ...] = ()
    """What the endpoint `scripted` answers, turn by turn."""
    task_id: str = ""
    """The caller's own name for the task; echoed back."""
    mode: Literal["transparent_proxy", "black_box"] = "transparent_proxy"
    """`black_box`: the agent's calls are relayed and not recorded."""
    max_tokens_cap: int = Field(default=4096, ge=0, lt=2**31)
    """Ceiling on the tokens of one answer; 0 means none."""
    max_turns: int = Field(default=0, ge=0, lt=2**31)
    """How many model calls the agent may make; 0 means no limit."""
    agent_timeout_s: float = Field(default=600, gt=0, le=604800)
    """The agent's wall-clock budget."""
    setup_timeout_s: float = Field(default=300, gt=0, le=604800)
    """The budget of all setup commands together."""
    verify_timeout_s: float = Field(default=300, gt=0, le=604800)
    """The budget of verification."""
    timeout_s: float | None = Field(default=None, gt=0, le=604800)
    """One deadline for everything, boot and scoring included; null: the sum of the parts and a minute."""
    agent: str = "opencode"
    """The agent CLI."""
    driver: str = ""
    """How the agent is driven, where it knows more than one way: OpenCode by `serve` (the default here) or `run`."""
    system_prompt: str = ""
    """Replaces the agent's own system prompt."""
    enabled_tools: tuple[str, ...] | None = None
    """Only these tools are offered to the model; null means all."""
    disabled_tools: tuple[str, ...] = ()
    """These are not offered."""
    sandbox: str = "local"
    """The kind of box."""
    template: str = ""
    """A prebaked image of that kind of box."""
    environment: str = ""
    """A remote environment, as `GET /environments` names it: the agent gets its tools, and it gives the reward."""
    environment_seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """The remote environment is reset with it."""
    verifier: str = ""
    """Python source of `verify(before, after)`, run beside the remote environment's data after the agent is gone."""
    idempotency_key: str = Field(default="", max_length=200)
    """Makes a repeated start safe: the same request under the same key joins the first, another one is refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """Null is the same as not given: published clients send it for what they leave open."""
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in _NOT_GIVEN}

    @classmethod
    def parsed(cls, arguments: Mapping[str, Any]) -> RolloutRequest:
        """The request in these arguments; BadArgument, without any value of theirs in it, where they make no sense."""
        try:
            return cls.model_validate(dict(arguments))
        except ValidationError as error:
            raise bad_argument(error, list(cls.model_fields)) from None


class Wanted(NamedTuple):
    """A request that was understood."""

    job: Job
    not_resumable_because: str
    """Why the log and the settings are not enough to run it again; empty where they are."""


def no_environments(name: str) -> str:
    """Where there are none."""
    raise BadArgument("environment", "environment: this server has no remote environments to give tools of")


def wanted(
    request: RolloutRequest,
    settings: Settings,
    *,
    scripted: Scripted,
    allowed: Sequence[str] = (),
    remote: Callable[[str], str] = no_environments,
) -> Wanted:
    """The job this request means; BadArgument where it means none.

    `allowed`: see `check_address`. `remote`: the address of a remote environment that callers may name.
    """
    try:
        environment = remote(request.environment) if request.environment else ""
        task = task_of(request)
        asked = endpoint_request(request)
        endpoint = endpoint_of(asked, task, settings, scripted=scripted, allowed=allowed)
        job = Job(
            task=task,
            model=endpoint,
            agent=AgentSpec(
                name=request.agent,
                driver=_driver(request),
                system_prompt=request.system_prompt,
                enabled_tools=request.enabled_tools,
                disabled_tools=request.disabled_tools,
            ),
            sandbox=SandboxSpec(backend=request.sandbox, template=_template(request)),
            environment=environment,
            mode=request.mode,
        )
    except ValidationError as error:
        raise bad_argument(error, list(RolloutRequest.model_fields)) from None
    except UsageError as error:
        raise argument_error(error) from None
    if any(getattr(asked, name).get_secret_value() for name in SECRETS):
        return Wanted(job, "the model's key came with the request and is never stored")
    return Wanted(job, "the model's address came with the request" if named_address(asked) else "")


def is_scripted(request: RolloutRequest) -> bool:
    """Whether this asks for the scripted model."""
    try:
        return kind_of(endpoint_request(request), task_of(request)) == "scripted"
    except (UsageError, ValidationError):
        return False  # `wanted` says what is wrong


def again(job: Job, settings: Settings, *, scripted: Scripted) -> Job:
    """A job out of the log, with its key in it again; UsageError where the settings no longer have what it needs."""
    kind = job.model.kind
    asked = EndpointRequest(endpoint=kind, model="" if kind == "scripted" else job.model.model)
    endpoint = resolve(asked, settings, job.task, scripted=scripted)
    if kind != "scripted" and endpoint.base_url != job.model.base_url:
        raise UsageError(f"endpoint {kind!r} has another address now")
    return job.model_copy(update={"model": endpoint.model_copy(update={"sampling": job.model.sampling})})


def _driver(request: RolloutRequest) -> str:
    """How the agent is driven: OpenCode through its own server, so that its transcript is live and an abort at once."""
    return request.driver or ("serve" if request.agent == "opencode" else "")


def _template(request: RolloutRequest) -> str:
    """The image that is meant; the published one has the agent in it and nothing more, and so has every box here."""
    return "" if request.template == PUBLISHED_TEMPLATE and request.sandbox != "e2b" else request.template


def task_of(request: RolloutRequest) -> Task:
    """What is to be done, and how it is judged."""
    script = (request.setup_shell,) if request.setup_shell.strip() else ()
    return Task(
        id=request.task_id,
        instruction=request.instruction,
        workdir=request.workdir,
        files=request.upload_files,
        setup=(*request.setup, *script),
        verify=request.verify,
        tests=request.tests,
        test_script=request.test_script,
        verify_in=request.verify_in,
        verifier=request.verifier,
        environment_seed=request.environment_seed,
        solution=request.solution,
        limits=Limits(
            agent_timeout_s=request.agent_timeout_s,
            setup_timeout_s=request.setup_timeout_s,
            verify_timeout_s=request.verify_timeout_s,
            timeout_s=request.timeout_s,
            max_tokens_cap=request.max_tokens_cap,
            max_turns=request.max_turns,
        ),
    )


def endpoint_request(request: RolloutRequest) -> EndpointRequest:
    """Who should think."""
    shared = set(EndpointRequest.model_fields) & set(RolloutRequest.model_fields)
    return EndpointRequest(**{name: getattr(request, name) for name in shared})


def named_address(request: EndpointRequest) -> str:
    """The address that the caller named; empty where it left that to us."""
    return request.base_url.strip() or request.vllm_url.strip()


def endpoint_of(
    request: EndpointRequest,
    task: Task,
    settings: Settings,
    *,
    scripted: Scripted,
    allowed: Sequence[str] = (),
) -> Endpoint:
    """The endpoint; a key of ours goes only to the address that our own settings, or the catalog, name."""
    if not named_address(request):
        return resolve(request, settings, task, scripted=scripted)
    kind = kind_of(request, task)
    ours = settings.endpoints.get(kind)
    if ours is None or not ours.api_key.get_secret_value():
        endpoint = resolve(request, settings, task, scripted=scripted)
    else:
        bare = settings.model_copy(
            update={"endpoints": {**settings.endpoints, kind: ours.model_copy(update={"api_key": SecretStr("")})}}
        )
        try:
            endpoint = resolve(request, bare, task, scripted=scripted)
        except UsageError as error:
            said = str(error)
            if "api_key" in said:
                said = "api_key: is missing; the server's own key goes only to the server's own address, so give yours"
            raise UsageError(said) from None
    check_address(endpoint.base_url, allowed)
    return endpoint


def check_address(url: str, allowed: Sequence[str]) -> None:
    """Refuse an address that lies below none of the allowed ones (`https://host[:port][/path]`); none allows all."""
    if allowed and not any(_below(url, each) for each in allowed):
        raise BadArgument("base_url", "base_url: this server does not call that address; ask its operator to allow it")


def _below(url: str, allowed: str) -> bool:
    here, there = urlsplit(url), urlsplit(allowed)
    path = there.path.rstrip("/")
    if ".." in here.path.split("/") or "%" in here.path:
        return False
    return _origin(here) == _origin(there) and (here.path == path or here.path.startswith(path + "/"))


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def bad_argument(error: ValidationError, known: Sequence[str]) -> BadArgument:
    """The first problem of a validation, in words. Values are not repeated: one of them may be a key."""
    return bad_details(error.errors(include_url=False, include_input=False)[0], known)


def bad_details(problem: Mapping[str, Any], known: Sequence[str]) -> BadArgument:
    """One problem of a validation, in words."""
    names = [str(part) for part in problem["loc"] if part not in ("task", "limits", "model")]
    where = ".".join(names)
    argument = names[0] if names else ""
    if problem["type"] == "extra_forbidden":
        if names[1:2] and names[0] == "solution":
            known = list((ScriptedCall if "tool_calls" in names[:-1] else ScriptedTurn).model_fields)
        near = get_close_matches(names[-1] if names else "", known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}" if known else ""
        return BadArgument(argument, f"unknown argument {where!r}{hint}")
    if problem["type"] == "missing":
        return BadArgument(argument, f"{where} is missing")
    said = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should ", "must ", 1)
    # The words of JSON, not of Python.
    said = said.replace("a valid tuple", "a list").replace("a valid dictionary", "an object")
    if not argument and (found := re.match(r"(files|tests): ", said)):
        argument = "upload_files" if found[1] == "files" else "tests"
        said = f"{argument}: {said[found.end() :]}"
    return BadArgument(argument, said if not where or said.startswith(where) else f"{where}: {said}")


_NAMES = re.compile(r"\b(" + "|".join(sorted(RolloutRequest.model_fields, key=len, reverse=True)) + r")\b")
_OPTION = re.compile(r"--([a-z][a-z-]+)")


def argument_error(error: UsageError) -> BadArgument:
    """The same error in the words of a caller: it names an argument, not an option of a command."""
    if isinstance(error, BadArgument):
        return error
    said = _OPTION.sub(lambda found: found[1].replace("-", "_"), str(error))
    if "no model endpoint is named" in said:
        return BadArgument("endpoint", said)
    found = re.search(r": (\w+)(?: or \w+)? is missing", said) or _NAMES.search(said)
    return BadArgument(found[1] if found else "", said)
