"""The options of `rollcage run`, made from the fields of `RolloutRequest`, and the task they and a file come to."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from pydantic import SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rollcage.cli.completion import named
from rollcage.endpoints import CATALOG, named_model
from rollcage.errors import UsageError
from rollcage.jobs import OTHER_MODEL, task_file
from rollcage.schema.endpoint import EndpointArguments
from rollcage.schema.groups import GroupRequest
from rollcage.schema.option import Option, option_name
from rollcage.schema.request import RolloutRequest
from rollcage.tasks import TaskFile

_SAMPLING = ("temperature", "seed", "top_logprobs", "history", "keep_reasoning")


OF_GROUP = ("n", "min_usable")
"""Arguments that make a group of one rollout."""


def run_options() -> list[click.Option]:
    """One option for each argument of a rollout, or of a group of them, that can be typed."""
    return _options([*RolloutRequest.model_fields, *OF_GROUP])


def model_options() -> list[click.Option]:
    """Those that name the model."""
    return _options([name for name in EndpointArguments.model_fields if name not in _SAMPLING])


EVAL_ARGUMENTS = (
    "api_key temperature seed top_logprobs history keep_reasoning thinking agent_timeout_s timeout_s setup_timeout_s"
    " verify_timeout_s max_tokens_cap max_turns driver system_prompt enabled_tools disabled_tools sandbox template"
    " system mode policy_version metadata"
).split()
"""Arguments of a rollout that make sense for all rollouts of a batch."""


def eval_options() -> list[click.Option]:
    """Those of `rollcage eval`, beside its own."""
    return _options(EVAL_ARGUMENTS)


def fleet_options() -> list[click.Option]:
    """Those of `rollcage fleet run`, where `--endpoint` is one of the environment's."""
    from rollcage.cli.fleet import AGENT_ARGUMENTS

    return _options(AGENT_ARGUMENTS, {"endpoint": "--endpoint-kind"})


def typed_task(path: str | None, options: Mapping[str, Any]) -> TaskFile:
    """The task with everything beside it: the file's word, and over it whatever was typed."""
    given = {name: value for name, value in options.items() if value not in (None, (), {})}
    if given.get("instruction") == "-":
        given["instruction"] = sys.stdin.read()
    return task_file(path, given | in_one_word(given))


def in_one_word(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `-m openai/gpt-4o-mini` means where nothing beside it names an endpoint; as `rollcage eval` takes it."""
    model = str(given.get("model", ""))
    kind = re.split(r"[:/]", model.lower().replace("-", "_"), maxsplit=1)[0]
    if any(given.get(name) for name in OTHER_MODEL) or kind not in {*CATALOG, "http", "https"} - {"custom"}:
        return {}
    named = named_model(model)
    if "api_key" in given:
        named.pop("api_key", None)
    return {"model": named.pop("model", None), **named}


def as_option(argument: str) -> str:
    """The name of an argument as it is typed here; other names stay as they are."""
    field = RolloutRequest.model_fields.get(argument)
    return option_name(argument) if field is not None and _option_of(field) else argument


def _option_of(field: FieldInfo) -> Option | None:
    return next((each for each in field.metadata if isinstance(each, Option)), None)


def _options(names: Iterable[str], spelled: Mapping[str, str] | None = None) -> list[click.Option]:
    """`spelled`: options that are typed otherwise than their arguments suggest."""
    fields = {**{name: GroupRequest.model_fields[name] for name in OF_GROUP}, **RolloutRequest.model_fields}
    found = [(name, fields[name], _option_of(fields[name])) for name in names]
    typed = {name: option_name(name) for name in fields} | dict(spelled or {})
    return [_option((name, typed[name]), field, option) for name, field, option in found if option is not None]


def _option(names: tuple[str, str], field: FieldInfo, option: Option) -> click.Option:
    name, typed = names
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind = kinds[0] if kinds and get_origin(field.annotation) not in (tuple, dict, Literal) else field.annotation
    shape = get_origin(kind) or kind
    spelled = f"{typed}/--no-{typed[2:]}" if shape is bool else typed
    more: dict[str, Any] = {"metavar": option.metavar or None, "help": _help(field, option, shape)}
    if option.metavar in ("NAME", "KIND") and shape is str:
        more["shell_complete"] = named
    if shape is bool:
        more["default"] = None
    elif shape is Literal:
        more["type"] = click.Choice([str(choice) for choice in get_args(kind)])
    elif option.is_file:
        more |= {"metavar": "FILE", "callback": _text_of}
    elif option.metavar == "PATH=FILE":
        more |= {"multiple": True, "callback": _texts_of}
    elif shape is dict:
        more["callback"] = _json_of
    elif shape is tuple:
        more["multiple"] = True
    elif shape in (int, float):
        kind_name = "SECONDS" if name.endswith("_s") else "INTEGER" if shape is int else "NUMBER"
        more |= {"type": _number(field), "metavar": kind_name}
    elif shape is SecretStr:
        more["type"] = SecretStr
    return click.Option([name, spelled, *([option.short] if option.short else [])], **more)


def _help(field: FieldInfo, option: Option, shape: object) -> str:
    """The docstring under the field, with the names of arguments as they are typed."""
    text = re.sub(r"`(\w+)`", lambda found: as_option(found[1]), " ".join((field.description or "").split()))
    if shape is tuple or option.metavar == "PATH=FILE":
        text += " May be repeated."
    default = field.default
    told = f"  [default: {default:g}]" if isinstance(default, int | float) and not isinstance(default, bool) else ""
    if isinstance(default, str) and default:
        told = f"  [default: {default}]"
    return " ".join(part for part in (text.replace("`", ""), option.more) if part) + told


def _number(field: FieldInfo) -> Callable[[str], Any]:
    """Reads a number within the bounds of the field."""
    adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())

    def number(text: str) -> Any:
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Input ").replace("should ", "must ", 1)
            raise click.BadParameter(f"{text!r} {said}") from None

    return number


def _text_of(ctx: click.Context, option: click.Parameter, name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"cannot read {name}: {reason}", argument=option.name or "") from error


def _texts_of(ctx: click.Context, option: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        path, separator, name = pair.partition("=")
        if not separator:
            raise UsageError(f"{pair!r} is not PATH=FILE", argument=option.name or "")
        found[path] = _text_of(ctx, option, name) or ""
    return found


def _json_of(ctx: click.Context, option: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"this is no JSON ({error})", argument=option.name or "") from error
