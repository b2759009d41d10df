"""Says in words, and by the names its writer used, what is wrong with a task; guesses what was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollcage.endpoints import EndpointRequest
from rollcage.types import AgentSpec, Check, Limits, SandboxSpec, ScriptedCall, ScriptedTurn, Task

SECRETS = frozenset({"api_key", "hf_token"})
"""Fields of an endpoint that a file must not carry: task files are shared and kept."""

BESIDE = ("agent", "sandbox", "endpoint", "environment", "mode")
"""The keys of a task file that are not the task's own."""

REFERENCES = {
    "instruction_file": "instruction",
    "test_script_file": "test_script",
    "verifier_file": "verifier",
    "solution_script_file": "solution_script",
    "solution_patch_file": "solution_patch",
}
"""Keys that name a file beside the task file, and the field that gets its text."""

FOLDERS = {"tests_folder": "tests_tree", "solution_folder": "solution_tree"}
"""Keys that name a folder beside the task file, and the field that gets what lies in it."""

TABLES: dict[str, type[BaseModel]] = {
    "limits": Limits,
    "checks": Check,
    "solution": ScriptedTurn,
    "solution.tool_calls": ScriptedCall,
    "agent": AgentSpec,
    "sandbox": SandboxSpec,
    "endpoint": EndpointRequest,
}
"""What the tables below the top level are, by their path without positions."""


def problems_of(error: ValidationError) -> list[str]:
    """One line per problem, each with the path of its field."""
    return [_problem(details) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails) -> str:
    """One problem, in words, with the path of the field as the file spells it."""
    location = details["loc"][1:] if details["loc"][:1] == ("task",) else details["loc"]
    where = ".".join(str(part) for part in location)
    if details["type"] == "extra_forbidden":
        table = ".".join(str(part) for part in location[:-1] if isinstance(part, str))
        known = list(TABLES[table].model_fields) if table in TABLES else _top_level()
        near = nearest(str(location[-1]), known)
        hint = f"did you mean {near!r}?" if near else f"known here are {', '.join(sorted(set(known) - SECRETS))}"
        return f"unknown key {where!r}; {hint}"
    return f"{where}: {_complaint(details)}"


def _complaint(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    words = {
        "string_type": "must be text",
        "tuple_type": "must be a list",
        "dict_type": "must be a table",
        "model_type": "must be a table",
        "bool_type": "must be true or false",
        "missing": "is missing",
    }.get(kind, "")
    if not words:
        # Pydantic's sentences all begin alike; what follows is what we want.
        words = details["msg"].removeprefix("Input ").replace("should ", "must ", 1)
    shown = repr(details["input"])
    return words if kind == "missing" else f"{words} (is {shown if len(shown) <= 60 else shown[:57] + '...'})"


def _top_level() -> list[str]:
    return [*Task.model_fields, *BESIDE, *REFERENCES, *FOLDERS]


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that was probably meant, if any comes close."""
    found = get_close_matches(name.lower(), list(known), n=1, cutoff=likeness)
    return found[0] if found else None
