"""From what was typed, and a task file if one was named, to what is wanted. Pure but for reading the files named."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr, ValidationError

from rollcage.endpoints import EndpointRequest
from rollcage.errors import UsageError
from rollcage.tasks import TaskFile, load
from rollcage.tasks.problems import problems_of
from rollcage.types import Task, Value

V = TypeVar("V", bound=Value)

ENDPOINT_OPTIONS = ("endpoint", "base_url", "model", "model_key", "vllm_url", "thinking")
SAMPLING_OPTIONS = ("temperature", "seed", "top_logprobs")
LIMIT_OPTIONS = {
    "timeout": "timeout_s",
    "agent_timeout": "agent_timeout_s",
    "setup_timeout": "setup_timeout_s",
    "verify_timeout": "verify_timeout_s",
    "max_tokens_cap": "max_tokens_cap",
    "max_turns": "max_turns",
}


def wanted(path: str | None, options: Mapping[str, Any]) -> TaskFile:
    """The task with everything beside it: the file's word, and over it whatever was typed."""
    if path is None and options.get("instruction") is None:
        raise UsageError("nothing to do: name a task file or give --instruction; see rollcage run --help")
    if options.get("instruction") == "-":
        options = {**options, "instruction": sys.stdin.read()}
    try:
        file = load(path) if path is not None else TaskFile(path=Path(), task=Task(instruction=_instruction(options)))
        return file.model_copy(
            update={
                "task": _task(file.task, options),
                "agent": _with(file.agent, name=options.get("agent")),
                "sandbox": _with(file.sandbox, backend=options.get("sandbox"), template=options.get("template")),
                "endpoint": endpoint_request(options, file.endpoint),
                "environment": options.get("environment") or file.environment,
                "mode": options.get("mode") or file.mode,
            }
        )
    except ValidationError as error:
        raise UsageError("\n".join(problems_of(error))) from error


def endpoint_request(options: Mapping[str, Any], below: EndpointRequest | None = None) -> EndpointRequest:
    """Who should think. An endpoint that is named on the command line puts the file's own out of force."""
    below = below or EndpointRequest()
    named = {name: options.get(name) for name in ENDPOINT_OPTIONS}
    for name in ("api_key", "hf_token"):
        named[name] = SecretStr(options[name]) if options.get(name) else None
    if any(named[name] for name in ("endpoint", "base_url", "model_key", "vllm_url", "hf_token")):
        sampling = below.model_dump(include={*SAMPLING_OPTIONS, "extra_body"})
        below = EndpointRequest(**sampling)
    if named["thinking"] is not None:
        below = below.model_copy(update={"disable_thinking": None})
    return _with(below, **named, **{name: options.get(name) for name in SAMPLING_OPTIONS})


def _task(task: Task, options: Mapping[str, Any]) -> Task:
    limits = _with(task.limits, **{field: options.get(option) for option, field in LIMIT_OPTIONS.items()})
    script, verifier = options.get("test_script"), options.get("verifier")
    return _with(
        task,
        id=options.get("task_id"),
        instruction=_instruction(options) if options.get("instruction") is not None else None,
        setup=(*task.setup, *options.get("setup", ())),
        verify=(*task.verify, *options.get("verify", ())),
        test_script=_file(script, "--test-script") if script else None,
        verify_in=options.get("verify_in"),
        verifier=_file(verifier, "--verifier") if verifier else None,
        environment_seed=options.get("environment_seed"),
        limits=limits,
    )


def _instruction(options: Mapping[str, Any]) -> str:
    text: str = options["instruction"]
    return text


def _file(name: str, option: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{option}: cannot read {name}: {reason}") from error


def _with(value: V, **changes: Any) -> V:
    """The value with these fields changed, checked again; None leaves a field as it is."""
    given = {name: change for name, change in changes.items() if change is not None}
    kept = {name: getattr(value, name) for name in value.model_fields_set if name not in given}
    return type(value).model_validate({**kept, **given})
