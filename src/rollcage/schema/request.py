"""The arguments of a rollout, in both published shapes: declared here, and nowhere else. Nothing is started here.

The HTTP body, the schema of the MCP tools, the options of `rollcage run`, the page's form and the typed clients are
made from `RolloutRequest`: an argument's name, type, bounds, default and words stand under its field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from rollcage.errors import UsageError
from rollcage.schema.endpoint import EndpointArguments
from rollcage.schema.option import Option
from rollcage.schema.sense import problem_of
from rollcage.types import HOME, Check, Identifier, Metadata, RewardFrom, ScriptedCall, ScriptedTurn, System, Value

SECRETS = ("api_key", "hf_token")
"""Arguments whose values are never stored, logged or said again."""
PLACES = {
    "task_id": ("task", "id"),
    "upload_files": ("task", "files"),
    "agent": ("agent", "name"),
    "sandbox": ("sandbox", "backend"),
}
"""Arguments whose field in a `Job` has another name: the part of the job, and the field in it."""
MOST_ARGUMENTS = 1000
"""Far more than there are; beyond it no mistake is looked for in each."""
MOST_ITEMS = 10_000
"""Files, commands or names in one argument."""

Texts = Annotated[tuple[str, ...], Field(max_length=MOST_ITEMS)]
FileTexts = Annotated[dict[str, str], Field(max_length=MOST_ITEMS)]


class _Instruction(Value):
    instruction: Annotated[str, Option("-i", metavar="TEXT", more="- reads stdin.")] = Field(title="Instruction")
    """The prompt for the agent, handed over verbatim."""


class RolloutRequest(EndpointArguments, _Instruction):
    """One rollout, as callers ask for it. Every argument is optional but `instruction`; null is not given."""

    task_id: Annotated[Identifier, Option(metavar="NAME")] = Field(default="", title="Name of the task")
    """The caller's own name for the task, at most 200 characters; echoed back."""
    setup: Annotated[Texts, Option(metavar="COMMAND")] = Field(default=(), title="Setup")
    """Bash commands run before the agent; the first that fails ends the rollout."""
    setup_shell: str = ""
    """Older shape: one setup script, run after `setup`."""
    setup_hosts: Annotated[Texts, Option(metavar="HOST")] = ()
    """Host names, or `*.suffix`, that setup may reach through a proxy; `packages`: the package indexes that the machine
    is configured with, to which pip and npm are then led; empty: no network."""
    verify_hosts: Annotated[Texts, Option(metavar="HOST")] = ()
    """The same for verify commands, which have no network otherwise. What they fetch decides the reward."""
    upload_files: Annotated[FileTexts, Option(metavar="PATH=FILE")] = {}
    """`{path in the box: text}`, staged before setup; a relative path is relative to the workdir."""
    verify: Annotated[Texts, Option(metavar="COMMAND")] = Field(default=(), title="Verify")
    """Bash commands run after the agent is gone; the reward is the share that passes, unless one writes
    `$REWARD_FILE`."""
    test_script: Annotated[str, Option(is_file=True)] = ""
    """Older shape: one bash verifier, staged after the agent; it writes its reward to `$REWARD_FILE`."""
    tests: Annotated[FileTexts, Option(metavar="PATH=FILE")] = {}
    """`{path: text}`, staged in `$TESTS_DIR` only after the agent is gone."""
    checks: tuple[Check, ...] = ()
    """Test frameworks to run after the agent is gone (pytest, unittest, node, go, cargo, junit, command), each with the
    tests that count; the reward is the share of those that passed."""
    verify_in: Annotated[Literal["box", "fresh"], Option()] = "box"
    """`box`: the same box put back as setup left it, but for the workdir; `fresh`: a new one."""
    keep: Annotated[Texts, Option(metavar="PATH")] = ()
    """Further paths below the home directory that verification sees as the agent left them."""
    restore: Annotated[tuple[str, ...] | None, Option(metavar="PATH")] = None
    """Paths in the workdir that are put back as setup left them before anything is judged; not given: those parts of
    its `.git` that make git run programs, and files that are tests by their names."""
    isolate: Annotated[bool, Option()] = False
    """The verifier does not see the workdir: it asks for the agent's work through the launcher `untrusted`."""
    reward_from: Annotated[RewardFrom | None, Option()] = None
    """Where the verifier's number is: in `reward.txt` (`$REWARD_FILE`), in `reward.json` beside it, or the share of
    `commands` that passed; `harbor`: by Harbor's rules; not given: a reward file where there is one and nothing
    contradicts it, else the commands."""
    seal_tests: Annotated[bool, Option()] = True
    """Nothing can change `$TESTS_DIR` while verification runs."""
    guards: Annotated[bool, Option()] = True
    """Scripts of the agent's that a plain verifier starts are launched apart from it, and do not end its process."""
    workdir: Annotated[str, Option(metavar="PATH")] = f"{HOME}/workdir"
    """Where the agent starts."""
    solution: tuple[ScriptedTurn, ...] = Field(default=(), max_length=MOST_ITEMS)
    """What the endpoint `scripted` answers, turn by turn."""
    mode: Annotated[Literal["transparent_proxy", "black_box"], Option()] = "transparent_proxy"
    """`black_box`: the agent's calls are relayed and not recorded."""
    timeout_s: Annotated[float | None, Option()] = Field(default=None, gt=0, le=604800, title="Time in all (s)")
    """One deadline for everything, boot and scoring included; not given: the sum of the parts and a minute."""
    agent_timeout_s: Annotated[float, Option()] = Field(default=600, gt=0, le=604800, title="Time for the agent (s)")
    """The agent's wall-clock budget."""
    setup_timeout_s: Annotated[float, Option()] = Field(default=300, gt=0, le=604800)
    """The budget of all setup commands together."""
    verify_timeout_s: Annotated[float, Option()] = Field(default=300, gt=0, le=604800)
    """The budget of verification."""
    max_tokens_cap: Annotated[int, Option()] = Field(default=4096, ge=0, lt=2**31, title="Tokens per answer")
    """Ceiling on the tokens of one answer; 0 means none."""
    max_turns: Annotated[int, Option()] = Field(default=0, ge=0, lt=2**31, title="Most turns")
    """How many model calls the agent may make; 0 means no limit."""
    agent: Annotated[str, Option(metavar="NAME")] = "opencode"
    """The agent CLI: opencode, claude-code, codex, pi, qwen-code, mini-swe-agent, ... (`rollcage agent ls`)."""
    driver: Annotated[str, Option(metavar="NAME")] = ""
    """How the agent is driven, where it knows more than one way: OpenCode by `serve` (the server's default) or
    `run`."""
    system_prompt: Annotated[str, Option(metavar="TEXT")] = ""
    """Replaces the agent's own system prompt."""
    enabled_tools: Annotated[tuple[str, ...] | None, Option(metavar="NAME")] = Field(
        default=None, max_length=MOST_ITEMS
    )
    """Only these tools are offered to the model; not given: all."""
    disabled_tools: Annotated[Texts, Option(metavar="NAME")] = ()
    """These are not offered."""
    sandbox: Annotated[str, Option(metavar="NAME")] = "local"
    """The kind of box: `local`, `container` or `e2b`."""
    template: Annotated[str, Option(metavar="NAME")] = ""
    """A prebaked image of that kind of box."""
    system: Annotated[System | None, Option()] = None
    """The programs in the box: those of the machine (`host`), or a Debian system that is the same on every machine
    (`base`: python, pip, pytest, git, node, gcc, make, rg, curl); not given: `base` once it was made."""
    environment: Annotated[str, Option(metavar="ADDRESS", more="Here: fleet:KEY, openenv:URL or mcp:URL.")] = ""
    """A remote environment, as `GET /environments` names it: the agent gets its tools, and it gives the reward."""
    environment_seed: Annotated[int | None, Option()] = Field(default=None, ge=-(2**63), lt=2**63)
    """The remote environment is reset with it."""
    verifier: Annotated[str, Option(is_file=True)] = ""
    """Python source of `verify(before, after)` (a third parameter, `answer`, is optional), run beside the remote
    environment's data after the agent is gone."""
    group_id: Annotated[Identifier, Option(metavar="NAME")] = ""
    """The caller's own name for the rollouts that belong together; echoed back."""
    policy_version: Annotated[Identifier, Option(metavar="NAME")] = ""
    """The caller's own name for the weights that are sampled; echoed back."""
    metadata: Annotated[Metadata, Option(metavar="JSON")] = {}
    """Any JSON object of the caller's own, at most 64 KiB; echoed back."""
    idempotency_key: str = Field(default="", max_length=200)
    """Makes a repeated start safe: the same request under the same key joins the first, another one is refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """Null is the same as not given: published clients send it for what they leave open."""
        if not isinstance(given, Mapping):
            return given
        if len(given) > MOST_ARGUMENTS:
            raise ValueError(f"there are {len(given)} arguments; at most {MOST_ARGUMENTS} are looked at")
        return {name: value for name, value in given.items() if value is not None}

    @field_validator("*", mode="before")
    @classmethod
    def _makes_sense(cls, value: object, info: ValidationInfo) -> object:
        """Text that can be written, commands that say something, and numbers that are no booleans."""
        name = str(info.field_name)
        kinds = {cls.model_fields[name].annotation, *get_args(cls.model_fields[name].annotation)}
        if isinstance(value, bool) and kinds & {int, float}:
            raise ValueError("must be a number, not true or false")
        if problem := problem_of(name, value):
            raise ValueError(problem)
        return value

    @classmethod
    def parsed(cls, arguments: Mapping[str, Any]) -> RolloutRequest:
        """The request in these arguments; UsageError, without any value of theirs in it, where they make no sense."""
        try:
            return cls.model_validate(dict(arguments))
        except ValidationError as error:
            raise bad_argument(error, list(cls.model_fields)) from None


def bad_argument(error: ValidationError, known: Sequence[str] = ()) -> UsageError:
    """The first problem of a validation, in words. Values are not repeated: one of them may be a key."""
    return bad_details(error.errors(include_url=False, include_input=False)[0], known)


def bad_details(problem: Mapping[str, Any], known: Sequence[str] = ()) -> UsageError:
    """One problem of a validation, in words. `known`: the arguments that there are."""
    path = [str(part) for part in problem["loc"]]
    argument = _ARGUMENTS.get((path or [""])[0], (path or [""])[0])
    inside = ".".join(path[1:])
    if problem["type"] == "extra_forbidden":
        if argument == "solution":
            known = list((ScriptedCall if "tool_calls" in path[:-1] else ScriptedTurn).model_fields)
        elif argument == "checks":
            known = list(Check.model_fields)
        near = get_close_matches((path or [""])[-1], known, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}" if known else ""
        if path in (["n"], ["min_usable"]):
            remedy = "it makes a group: POST /groups, start_group, run_group, or rollcage run -n"
        what = f"unknown argument {'.'.join(path)!r}" if inside else "unknown argument"
        return UsageError(what, argument=argument, remedy=remedy)
    said = "is missing" if problem["type"] == "missing" else _words(problem)
    return UsageError(f"{inside}: {said}" if inside else said, argument=argument)


_ARGUMENTS = {field: argument for argument, (part, field) in PLACES.items() if part == "task"}
"""What callers call a field of a task that has another name."""


def _words(problem: Mapping[str, Any]) -> str:
    """What is wrong with a value, in the words of JSON and not of Python."""
    if problem["type"] == "value_error":
        return str(problem.get("ctx", {}).get("error", problem["msg"]))
    if problem["type"] == "string_pattern_mismatch":
        return "must not hold control characters"
    said: str = problem["msg"].removeprefix("Input ").removeprefix("String ").replace("should ", "must ", 1)
    return said.replace("a valid tuple", "a list").replace("a valid dictionary", "an object")
