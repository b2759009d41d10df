"""From the arguments of a rollout to its job, for every interface: the server's callers, the command line, Python."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from rollcage.endpoints import (
    EndpointRequest,
    Scripted,
    kind_of,
    named_address,
    opened,
    resolve,
    resolve_for_caller,
)
from rollcage.errors import UsageError
from rollcage.schema.endpoint import EndpointArguments
from rollcage.schema.errors import NoSuchEnvironment
from rollcage.schema.request import PLACES, SECRETS, RolloutRequest, bad_argument
from rollcage.schema.sense import clash_of, problem_of
from rollcage.settings import Settings
from rollcage.tasks import TaskFile, load
from rollcage.tasks.expected import expected_of
from rollcage.types import NO_MODEL, AgentSpec, Endpoint, Job, Limits, SandboxSpec, Task, Value

V = TypeVar("V", bound=Value)

PUBLISHED_TEMPLATE = "opencode-rl"
"""The image that users of the published environment build and name."""
PARTS: dict[str, type[Value]] = {"task": Task, "limits": Limits, "agent": AgentSpec, "sandbox": SandboxSpec}
ECHOED = ("group_id", "policy_version", "metadata")
"""What callers get back as they gave it."""
NO_MODEL_AGENTS = frozenset({"nop", "oracle"})
"""Agents that need no model: none has to be named for them."""
OTHER_MODEL = ("endpoint", "base_url", "model_key", "vllm_url", "hf_token")
"""Arguments that name another model than a task file does."""
WHOLE_SYSTEM = ("/",)
"""What a task keeps of the agent's that keeps everything."""
ANY_MODEL = {"temperature", "seed", "top_logprobs", "history", "keep_reasoning", "extra_body"}
"""What a task file says of its model that holds for another one, too."""


class CallerJob(NamedTuple):
    """A caller's request that was understood."""

    job: Job
    not_resumable_because: str
    """Why the log and the settings are not enough to run it again; empty where they are."""


def no_environments(name: str) -> str:
    """Where there are none."""
    raise UsageError("this server has no remote environments to give tools of", argument="environment")


def to_job(
    request: RolloutRequest,
    settings: Settings,
    *,
    scripted: Scripted,
    allowed: Sequence[str] = (),
    remote: Callable[[str], str] = no_environments,
) -> CallerJob:
    """The job that a caller of a server asks for; UsageError, which names the argument, where there is none.

    `allowed`: see `check_address`. `remote`: the address of a remote environment that callers may name.
    """
    try:
        environment = remote(request.environment) if request.environment else ""
    except NoSuchEnvironment as error:
        # Here it is one argument of several that is wrong, and not an address where there is nothing.
        raise UsageError(error.message, argument="environment", remedy=error.remedy) from None
    _check_names("setup_hosts", request.setup_hosts)
    _check_names("verify_hosts", request.verify_hosts)
    asked = _endpoint(request)
    task = task_of(request)
    if needs_model(request.agent, asked):
        endpoint = resolve_for_caller(asked, settings, task, scripted=scripted, allowed=allowed)
    else:
        endpoint = NO_MODEL
    job = _job(request, task, endpoint, environment)
    if any(getattr(asked, name).get_secret_value() for name in SECRETS):
        return CallerJob(job, "the model's key came with the request and is never stored")
    return CallerJob(job, "the model's address came with the request" if named_address(asked) else "")


def rebuild_job(job: Job, settings: Settings, *, scripted: Scripted) -> Job:
    """A job out of the log, with its key in it again; UsageError where the settings no longer have what it needs."""
    kind = job.model.kind
    if kind == NO_MODEL.kind:
        return job
    asked = EndpointRequest(endpoint=kind, model="" if kind == "scripted" else job.model.model)
    endpoint = resolve(asked, settings, job.task, scripted=scripted)
    if kind != "scripted" and endpoint.base_url != job.model.base_url:
        raise UsageError(f"endpoint {kind!r} has another address now")
    return job.model_copy(update={"model": endpoint.model_copy(update={"sampling": job.model.sampling})})


def is_scripted(request: RolloutRequest) -> bool:
    """Whether this asks for the scripted model."""
    asked = _endpoint(request)
    try:
        return needs_model(request.agent, asked) and kind_of(asked, task_of(request)) == "scripted"
    except UsageError:
        return False  # `to_job` says what is wrong


def needs_model(agent: str, asked: EndpointRequest) -> bool:
    """Whether this agent needs a model, or is to be lent the one that is named."""
    return agent not in NO_MODEL_AGENTS or asked.names_something


@asynccontextmanager
async def opened_model(file: TaskFile, settings: Settings) -> AsyncIterator[Endpoint]:
    """The model for a task file, for as long as the block lasts; `NO_MODEL` where its agent needs none."""
    if needs_model(file.agent.name, file.endpoint):
        async with opened(file.endpoint, settings, file.task) as endpoint:
            yield endpoint
    else:
        yield NO_MODEL


def task_of(request: RolloutRequest) -> Task:
    """What is to be done, and how it is judged; UsageError where that makes no sense."""
    parts = _parts({name: getattr(request, name) for name in RolloutRequest.model_fields})
    script = (request.setup_shell,) if request.setup_shell.strip() else ()
    try:
        parts["task"]["setup"] = (*request.setup, *script)
        task = Task(**parts["task"], limits=Limits(**parts["limits"]))
    except ValidationError as error:
        raise bad_argument(error) from None
    _check_files(task)
    expected_of(task)
    return task


def _job(request: RolloutRequest, task: Task, endpoint: Endpoint, environment: str) -> Job:
    parts = _parts({name: getattr(request, name) for name in RolloutRequest.model_fields})
    if request.template == PUBLISHED_TEMPLATE and request.sandbox != "e2b":
        # It has the agent in it and nothing more, and so has every box here.
        parts["sandbox"]["template"] = ""
    if request.agent == "opencode" and not request.driver:
        # Through its own server, so that its transcript is live and an abort at once.
        parts["agent"]["driver"] = "serve"
    try:
        return Job(
            task=task,
            model=endpoint,
            agent=AgentSpec(**parts["agent"]),
            sandbox=SandboxSpec(**parts["sandbox"]),
            environment=environment,
            mode=request.mode,
            **{name: getattr(request, name) for name in ECHOED},
        )
    except ValidationError as error:
        raise bad_argument(error) from None


def _parts(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments by the part of a job they go to, and by the names they have there."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    for argument, value in arguments.items():
        part, field = PLACES.get(argument, ("", argument))
        if not part:
            part = next((name for name, kind in PARTS.items() if argument in kind.model_fields), "")
        if part:
            parts[part][field] = value
    return parts


def _endpoint(request: RolloutRequest) -> EndpointRequest:
    return EndpointRequest(**{name: getattr(request, name) for name in EndpointArguments.model_fields})


def _check_names(argument: str, hosts: Sequence[str]) -> None:
    """A caller names hosts: an address could be one of the server's own network, which names must not lead to."""
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            continue
        raise UsageError(f"{host} is an address", argument=argument, remedy="give the name of a public host")


def _check_task(task: Task) -> None:
    """What a task file says is held to the same as what a caller says."""
    for argument in RolloutRequest.model_fields:
        part, field = PLACES.get(argument, ("task", argument))
        if part == "task" and (problem := problem_of(argument, getattr(task, field, None))):
            raise UsageError(problem, argument=argument)
    _check_files(task)


def _check_files(task: Task) -> None:
    """Files that cannot be written beside each other are found before there is a box."""
    for argument, files, folder in (("upload_files", task.files, task.workdir), ("tests", task.tests, task.tests_dir)):
        if clash := clash_of(files, folder):
            raise UsageError(clash, argument=argument)


def task_file(path: str | Path | None, arguments: Mapping[str, Any]) -> TaskFile:
    """What a task file says and, over it, what was given beside it: arguments by their names; None is not given.

    `setup` and `verify` add to the file's. UsageError where the two make no sense together.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    RolloutRequest.parsed({"instruction": "", **given})
    if path is None and "instruction" not in given:
        raise UsageError("nothing to do", remedy="name a task file or give {instruction}")
    try:
        file = load(path) if path is not None else TaskFile(path=Path(), task=Task(instruction=given["instruction"]))
    except ValidationError as error:
        raise bad_argument(error) from error
    return with_arguments(file, given)


def with_arguments(file: TaskFile, arguments: Mapping[str, Any]) -> TaskFile:
    """The same with these arguments over it, as `task_file` has them."""
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        parts = _parts(given)
        if given.get("isolate") and "keep" not in given and file.task.keep == WHOLE_SYSTEM:
            parts["task"]["keep"] = ()  # tasks of others keep everything unasked
        script = (given["setup_shell"],) if given.get("setup_shell", "").strip() else ()
        added = {
            "setup": (*file.task.setup, *given.get("setup", ()), *script),
            "verify": (*file.task.verify, *given.get("verify", ())),
        }
        limits = changed(file.task.limits, parts["limits"])
        task = changed(file.task, {**parts["task"], **added, "limits": limits})
        _check_task(task)
        more = changed(
            file,
            {
                "task": task,
                "agent": changed(file.agent, parts["agent"]),
                "sandbox": changed(file.sandbox, parts["sandbox"]),
                "endpoint": endpoint_request(given, file.endpoint),
                **{name: given[name] for name in ("environment", "mode", *ECHOED) if name in given},
            },
        )
    except ValidationError as error:
        raise bad_argument(error) from error
    expected_of(more.task)
    return more


def job_of(file: TaskFile, endpoint: Endpoint) -> Job:
    """The job of a task file, with the model that its words about one came to."""
    beside = {name: getattr(file, name) for name in ("agent", "sandbox", "environment", "mode", *ECHOED)}
    return Job(task=file.task, model=endpoint, **beside)


def endpoint_request(arguments: Mapping[str, Any], below: EndpointRequest | None = None) -> EndpointRequest:
    """Who should think. A model that is named here puts the file's own out of force."""
    below = below or EndpointRequest()
    given = {name: arguments[name] for name in EndpointArguments.model_fields if arguments.get(name) is not None}
    if any(name in given for name in OTHER_MODEL):
        below = EndpointRequest(**below.model_dump(include=ANY_MODEL))
    if "thinking" in given:
        below = below.model_copy(update={"disable_thinking": None})
    return changed(below, given)


def changed(value: V, changes: Mapping[str, Any]) -> V:
    """The value with these fields changed, checked again."""
    kept = {name: getattr(value, name) for name in value.model_fields_set if name not in changes}
    return type(value).model_validate({**kept, **changes})
