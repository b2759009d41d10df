"""The values everything else speaks in: what goes into a rollout and what comes out of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

HOME = "/home/user"
"""The agent's home directory in every box, whatever the backend: equal paths make equal prompts."""

TESTS_DIR = f"{HOME}/tests"
"""Where a task's tests are staged, after the agent is gone."""
LOGS_DIR = f"{HOME}/logs"
"""Where the verifier leaves its reward."""
PROGRAMS = f"{HOME}/.rollcage"
"""Where the agent's own program and settings are; no file of a task goes there."""

JsonObject = dict[str, Any]
"""A JSON object whose shape belongs to somebody else (an engine, an agent)."""


class Value(BaseModel):
    """Base of all values: frozen, strict about unknown keys, documented by the docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Stage(StrEnum):
    """Where a rollout is. Stages follow each other and never overlap."""

    QUEUED = "queued"
    PROVISION = "provision"
    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"
    ENDED = "ended"


class Outcome(StrEnum):
    """How a rollout ended, which says nothing of what it earned. Only the first four can carry a reward."""

    FINISHED = "finished"
    """The agent ended by itself, and what it left was scored (or there was nothing to verify)."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent used up its time; what it left was scored."""
    AGENT_FAILED = "agent_failed"
    """The agent ended with an error of its own; what it left was scored."""
    LIMIT_REACHED = "limit_reached"
    """The agent used up its turns or tokens; what it left was scored."""
    SETUP_FAILED = "setup_failed"
    """A setup command failed or hung; the agent never ran."""
    VERIFY_FAILED = "verify_failed"
    """The verifier hung or left something that is no reward."""
    SANDBOX_FAILED = "sandbox_failed"
    """No box could be opened."""
    SANDBOX_LOST = "sandbox_lost"
    """The box vanished while it was in use."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The remote environment could not be had, reset or reached, or was lost."""
    MODEL_UNREACHABLE = "model_unreachable"
    """The model's endpoint did not answer, or refused us."""
    TIMED_OUT = "timed_out"
    """The one deadline of the whole rollout passed before the agent could start."""
    ABORTED = "aborted"
    """Somebody asked for it to stop."""
    CRASHED = "crashed"
    """The process that ran it died."""
    INTERNAL_ERROR = "internal_error"
    """A fault of rollcage's own; the log has the details."""

    @property
    def scored(self) -> bool:
        """Whether a rollout with this outcome may carry a reward."""
        return self in (Outcome.FINISHED, Outcome.AGENT_TIMEOUT, Outcome.AGENT_FAILED, Outcome.LIMIT_REACHED)

    @property
    def blame(self) -> Blame | None:
        """Whose fault it usually is that a rollout with this outcome has no reward."""
        return _BLAME.get(self)

    @classmethod
    def _missing_(cls, value: object) -> Outcome | None:
        return cls.FINISHED if value == FINISHED_BEFORE else None


class Blame(StrEnum):
    """Whose fault it is that a rollout has no reward: trainers count `agent` as a zero, and drop the others."""

    AGENT = "agent"
    """What the agent did kept the verifier from judging it."""
    TASK = "task"
    """The task's own setup or verifier is broken: it fails whoever works on it."""
    INFRASTRUCTURE = "infrastructure"
    """The machine, a box, the network, the model or rollcage itself failed: another try may fare better."""


_BLAME = {
    Outcome.SETUP_FAILED: Blame.TASK,
    Outcome.VERIFY_FAILED: Blame.TASK,
    Outcome.SANDBOX_FAILED: Blame.INFRASTRUCTURE,
    Outcome.SANDBOX_LOST: Blame.INFRASTRUCTURE,
    Outcome.ENVIRONMENT_FAILED: Blame.INFRASTRUCTURE,
    Outcome.MODEL_UNREACHABLE: Blame.INFRASTRUCTURE,
    Outcome.TIMED_OUT: Blame.INFRASTRUCTURE,
    Outcome.CRASHED: Blame.INFRASTRUCTURE,
    Outcome.INTERNAL_ERROR: Blame.INFRASTRUCTURE,
}
"""By outcome; an `Ended` that knows better says so itself. Nobody is to blame for what was stopped on request, or had
nothing to verify."""

Trust = Literal["isolated", "in_process", "shared"]
"""How far a reward can be trusted, best first."""

RewardFrom = Literal["reward.txt", "reward.json", "commands", "harbor"]
"""Where a verifier's number can be. `harbor`: in reward.json, else in reward.txt, and nowhere else."""

FINISHED_BEFORE = "succeeded"
"""What `finished` was called: callers may still say it, and clients of the published shapes are told it."""


class Standing(StrEnum):
    """What a rollout came to, at a glance: views colour by it, and exit codes follow it."""

    RUNNING = "running"
    """It has not ended."""
    PASSED = "passed"
    """Its reward is 1 or more."""
    PARTIAL = "partial"
    """Its reward is between 0 and 1."""
    FAILED = "failed"
    """Its reward is 0 or less."""
    UNSCORED = "unscored"
    """The agent finished and there was nothing to verify."""
    BROKEN = "broken"
    """It has no reward because something broke, or because it was stopped."""

    @classmethod
    def of(cls, outcome: Outcome | None, reward: float | None) -> Standing:
        """The standing of a rollout that ended so and earned this."""
        if outcome is None:
            return cls.RUNNING
        if reward is None:
            return cls.UNSCORED if outcome is Outcome.FINISHED else cls.BROKEN
        return cls.PASSED if reward >= 1 else cls.PARTIAL if reward > 0 else cls.FAILED


class Purpose(StrEnum):
    """What the agent made a model call for; trainers leave out what is not the policy."""

    AGENT = "agent"
    TITLE = "title"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"


POLICY = frozenset({Purpose.AGENT, Purpose.SUBAGENT})
"""What is trained unless more is asked for: titles and summaries are not what the policy is for."""


class CallOrigin(NamedTuple):
    """Who made a model call, and what for."""

    purpose: Purpose = Purpose.AGENT
    session: str = ""
    """The agent's own name for the conversation; empty where it tells none."""
    parent_session: str = ""
    """The conversation that started it, for subagents."""


CallClassifier = Callable[[Mapping[str, str], JsonObject], CallOrigin]
"""Tells the origin of a call by its headers (names in lower case) and its body (as one of chat completions)."""


class Alternative(NamedTuple):
    """One of the engine's top candidates at a position."""

    text: str
    id: int | None
    logprob: float


class Token(NamedTuple):
    """One sampled token as the engine counted it. Rows, so that lists cannot misalign."""

    text: str
    id: int | None
    logprob: float | None
    top: tuple[Alternative, ...] = ()


SAMPLING_FIELDS = (
    "temperature top_p top_k min_p typical_p presence_penalty frequency_penalty repetition_penalty repeat_penalty "
    "logit_bias seed"
).split()
"""Fields of a request that change what is sampled, by the names engines have for them."""


class TurnHistory(Value):
    """What became of `history = "exact"` in one turn."""

    exact: bool = False
    """Whether the prompt begins with an earlier turn's own ids, its prompt and its answer."""
    reason: str = ""
    """Why not, where not: then the prompt is what the engine's template made of the messages."""
    turn: int | None = None
    """That earlier turn's index."""
    kept: int = 0
    """How many ids of it the prompt begins with. An end token that follows them was put in, where it was cut."""
    rendered: int = 0
    """How many ids the template would have made of the messages."""
    differs_at: int | None = None
    """Where the template's ids would have been others for the first time; None: nowhere."""
    changed: tuple[str, ...] = ()
    """What of that turn's answer the agent sent back in other words: `content`, `arguments`, `reasoning`."""


class Turn(Value):
    """One model call: what was sent, what came back, token by token."""

    index: int
    """Order of arrival within the rollout, from 0."""
    replaces: int | None = None
    """The broken attempt that this call repeats, by its index: the agent went on as if that one had never been."""
    purpose: Purpose = Purpose.AGENT
    """What the agent made this call for."""
    session: str = ""
    """The agent's own session id, where it sends one."""
    parent_session: str = ""
    """The session that started this one (subagents)."""
    policy_version: str = ""
    """The weights that were asked, as the caller names them; stamped when the call begins."""
    request: JsonObject
    """The request body exactly as it was sent upstream, but for the ids of an exact prompt, which are `prompt_ids`. Of
    a call that failed, after too many bytes of such, only `not_kept`: size, SHA-256 and beginning."""
    message: JsonObject = {}
    """The assistant message, assembled from the answer."""
    prompt_ids: tuple[int, ...] = ()
    """The engine's own ids of the whole prompt; empty where the engine does not tell."""
    tokens: tuple[Token, ...] = ()
    """Every sampled token in order, the end token included."""
    finish_reason: str | None = None
    """Why generation ended; None for a turn that was cut."""
    usage: JsonObject = {}
    """The engine's own count."""
    status: int = 0
    """HTTP status of the upstream's answer; 0 where none came."""
    error: str | None = None
    """What broke, in one line; None for a whole turn."""
    trainable: bool = False
    """Ids and logprobs are complete and agree with the engine's own count."""
    untrainable_reason: str = ""
    """Why not, where not."""
    history: TurnHistory | None = None
    """How the prompt was made, with `history = "exact"`; None without."""
    streamed: bool = True
    """Whether the agent got this turn as a stream."""
    started_at: float = 0.0
    """Unix time at which the agent's request had arrived."""
    first_token_s: float | None = None
    """Seconds until the first token of the answer."""
    seconds: float = 0.0
    """Seconds from the agent's request to the end of the answer."""

    @property
    def sampling(self) -> JsonObject:
        """How the engine was told to sample, by the request that it got; what is not named was left to the engine.

        `logprobs_mode`: `processed` where the request asked for logprobs after temperature and filters, else
        `engine_default`; the two differ only where sampling is not plain.
        """
        told = {name: self.request[name] for name in SAMPLING_FIELDS if self.request.get(name) is not None}
        mode = "processed" if self.request.get("post_sampling_probs") is True else "engine_default"
        return {**told, "logprobs_mode": mode}


KEY_REPEATED = "the answer repeats a key, which is not kept"
"""Why a turn with a secret in it cannot be trained on."""


class CommandResult(Value):
    """One shell command that was run in the box, with what it printed."""

    command: str
    """The shell text."""
    exit_code: int
    """Its exit code; 124 where its time ran out, 128+n where signal n killed it."""
    stdout: str = ""
    """The end of what it printed (long output is cut at the front)."""
    stderr: str = ""
    """The end of what it complained about."""
    seconds: float = 0.0
    """Wall time."""
    truncated: bool = False
    """Whether output was cut."""
    timed_out: bool = False
    """Whether it was killed because its time ran out."""
    refused_hosts: tuple[str, ...] = ()
    """Hosts that a setup command asked for and was not allowed to reach."""


class Reward(Value):
    """What a rollout earned: a total, and named parts where the verifier gave them."""

    total: float
    """The number trainers use."""
    parts: dict[str, float] = {}
    """Named components: the tests of `checks`, what `reward.json` says, and `verify` where a remote environment gave
    the total."""
    source: Literal["reward_file", "reward_json", "commands", "checks", "environment"] = "commands"
    """Where the number came from."""
    notice: str = ""
    """What is to be known about the total: where the verifier gave none, how it was made."""
    trust: Trust = "shared"
    """How far code under test was kept from what judged it. `isolated`: none of it was in the judge's reach.
    `in_process`: a test framework reported from inside the code's process. `shared`: the verifier may have run it
    beside itself."""


class Check(Value):
    """Tests that a framework runs against the agent's code: a complete report of the expected ones decides."""

    kind: Literal["pytest", "unittest", "node", "go", "cargo", "junit", "log", "command"]
    """Who runs the tests. `junit`: a command that writes a JUnit XML report. `log`: a script whose output is read
    outside the box. `command`: one command is the test."""
    path: str = ""
    """What to run of the task's `tests`: a file or a folder, relative to `$TESTS_DIR`; empty: all. For `go` a package
    (`./calc`), for `cargo` a test target (`tests/calc.rs` is `calc`)."""
    expect: tuple[str, ...] = ()
    """The tests that count, by the names that the framework reports: `test_calc.py::test_add` (pytest),
    `test_calc.Add.test_add` (unittest), `calc.test.mjs > adds` (node), `example.com/calc::TestAdd` (go),
    `tests/calc.rs::adds` (cargo), `classname::name` (junit). Empty, for pytest and unittest: what stands in the files.
    """
    maintain: tuple[str, ...] = ()
    """For `log`: further tests that count, and may be skipped."""
    together: bool = False
    """Its tests earn 1 where all of them passed, and 0 else; each is still a part of the reward."""
    name: str = Field(default="", max_length=100)
    """Stands before the names of its tests in `reward.parts`; a `command` has no other name."""
    isolation: Literal["reported", "proxied"] = "reported"
    """`reported`: the framework runs as the judged, and its report counts. `proxied` (pytest, unittest, node): it runs
    in the judge, and the agent's modules are called in a process of their own."""
    import_from: tuple[str, ...] = (".",)
    """Folders of the workdir from which Python tests import the agent's modules."""
    interpreter: str = ""
    """The program that runs the tests, or its path in the box; empty: `python3`, `node`, `go` or `cargo`."""
    command: str = ""
    """For `junit`, `log` and `command`: bash, run in the workdir as the judged."""
    parser: str = ""
    """For `log`: who reads the output, by name (`pytest`, `pytest_v2`, `django`, ...)."""
    report: str = ""
    """For `junit`: where the command writes its report, relative to the workdir."""
    stdin: str = ""
    """For `command`: what it reads."""
    stdout: str | None = None
    """For `command`: what it must print, white space at the end aside; None: anything."""
    exit_code: int = 0
    """For `command`: how it must end."""
    timeout_s: float = Field(default=60, gt=0)
    """How long its tests may take together; what has not been reported then has failed."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Check:
        runs_command = self.kind in ("junit", "log", "command")
        if runs_command != bool(self.command.strip()):
            raise ValueError(f"kind {self.kind!r} {'needs' if runs_command else 'takes no'} `command`")
        if (self.kind == "junit") != bool(self.report):
            raise ValueError(f"kind {self.kind!r} {'needs' if self.kind == 'junit' else 'takes no'} `report`")
        if (self.kind == "log") != bool(self.parser) or (self.maintain and self.kind != "log"):
            raise ValueError("kind 'log' needs `parser`; no other takes it, or `maintain`")
        if self.isolation == "proxied" and self.kind not in ("pytest", "unittest", "node"):
            raise ValueError(f"kind {self.kind!r} cannot be proxied; pytest, unittest and node can")
        if self.kind in ("node", "go", "cargo", "junit", "log") and not (self.expect or self.maintain):
            raise ValueError(f"kind {self.kind!r} needs `expect`: the names of the tests that count")
        if self.kind == "command" and self.expect:
            raise ValueError("kind 'command' is one test: give it a `name`, not `expect`")
        for path in (self.path, self.report, *self.import_from):
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
                raise ValueError(f"{path!r} must be a relative path that leads nowhere else")
        return self


class ScriptedTurn(Value):
    """One answer of the scripted model."""

    text: str = ""
    """What it says."""
    reasoning: str = ""
    """What it thinks first, where the wire has a place for that."""
    tool_calls: tuple[ScriptedCall, ...] = ()
    """Tools it calls, in order, all in this one answer."""
    status: int = 200
    """Another status makes it an HTTP error with `text` as the message."""
    delay_s: float = 0.0
    """How long it waits before its first token."""
    token_delay_s: float = 0.0
    """How long it waits before each further chunk."""
    cut_after: int | None = None
    """The connection breaks after this many chunks."""
    error_after: int | None = None
    """An error event is sent in the stream after this many chunks."""
    finish_reason: str = ""
    """Forces a finish reason; empty means what follows from the answer."""
    times: int | None = None
    """The fault above happens this many times, then the next turn of the script answers in its place; None: always."""


class ScriptedCall(Value):
    """One tool call of the scripted model."""

    name: str
    """The tool."""
    arguments: JsonObject = {}
    """Its arguments."""
    raw_arguments: str | None = None
    """Sent instead of `arguments`, verbatim: for malformed JSON."""


class Limits(Value):
    """How much a rollout may use."""

    agent_timeout_s: float = Field(default=600, gt=0)
    """The agent's wall-clock budget."""
    setup_timeout_s: float = Field(default=300, gt=0)
    """The budget of all setup commands together."""
    verify_timeout_s: float = Field(default=300, gt=0)
    """The budget of verification; this much of the deadline is kept for it."""
    timeout_s: float | None = Field(default=None, gt=0)
    """One deadline for everything, boot and scoring included; None: the sum of the parts and a minute for the boot."""
    max_tokens_cap: int = Field(default=4096, ge=0)
    """Ceiling on the tokens of one answer; 0 means none."""
    max_turns: int = Field(default=0, ge=0)
    """How many model calls the agent may make; 0 means no limit."""
    token_budget: int = Field(default=0, ge=0)
    """How many tokens the model may generate in all; 0 means no limit."""

    @property
    def deadline_s(self) -> float:
        """Seconds from the start to the end of everything."""
        if self.timeout_s is not None:
            return self.timeout_s
        return 60 + self.setup_timeout_s + self.agent_timeout_s + self.verify_timeout_s

    @property
    def reserve_s(self) -> float:
        """The part of the deadline that only scoring may use."""
        return min(self.verify_timeout_s, self.deadline_s / 4)


Identifier = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f]*$")]
METADATA_LIMIT = 64 << 10
"""Bytes of JSON that a caller may attach to a rollout."""


def _bounded(value: JsonObject) -> JsonObject:
    try:
        written = json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {str(error) or type(error).__name__}") from None
    if len(written) > METADATA_LIMIT:
        raise ValueError(f"is {len(written)} bytes of JSON; at most {METADATA_LIMIT} are kept")
    return value


Metadata = Annotated[JsonObject, AfterValidator(_bounded)]
"""A JSON object of the caller's own, small enough to be stored with every rollout."""


def resolve_box_path(path: str, folder: str, *, top: str = HOME) -> str:
    """Where a path a task names lies in the box: relative to `folder`, and always below `top`, the home directory."""
    pure = PurePosixPath(folder, path)
    if ".." in pure.parts or not pure.is_relative_to(top) or pure == PurePosixPath(folder) or "\0" in path:
        raise ValueError(f"{path!r} does not name a file below {top}")
    return str(pure)


class FileTree(Value):
    """Files of any kind and size, by reference: an archive that is kept once, named by its content."""

    digest: str
    """Of the archive: BLAKE2b, 128 bits. The log has it, and not the files."""
    size: int = 0
    """Bytes of all files."""
    files: int = 0
    """How many there are."""
    path: str = Field(default="", exclude=True)
    """Where they lie on this machine, for whoever has to make the archive."""


Paths = Literal["home", "system"]
SYSTEM_OWN = ("/dev", "/proc", "/sys", "/run", "/tmp")  # noqa: S108
"""What no task can put files to, or work in, even where its paths are those of the system."""


class Task(Value):
    """A piece of work and how to judge it."""

    id: Identifier = ""
    """The caller's own name for it; echoed back."""
    instruction: str
    """The prompt for the agent, handed over verbatim."""
    paths: Paths = "home"
    """`system`: its paths are those of a whole machine, as tasks in Harbor's format have them: it may work in /app, its
    tests are in /tests, its reward in /logs/verifier. Its box is one whose system can be written, and its commands see
    themselves as root."""
    workdir: str = f"{HOME}/workdir"
    """Where the agent starts, and what verification sees of its work."""
    trees: dict[str, FileTree] = {}
    """`{folder: files}`, staged before `files`: what is binary, large, or has modes and links of its own."""
    files: dict[str, str] = {}
    """`{path: text}`, staged before setup; a relative path is relative to the workdir."""
    setup: tuple[str, ...] = ()
    """Bash commands run before the agent, in order; the first that fails ends the rollout."""
    verify: tuple[str, ...] = ()
    """Bash commands run after the agent is gone."""
    tests: dict[str, str] = {}
    """`{path: text}`, staged in `$TESTS_DIR` only after the agent is gone."""
    tests_tree: FileTree | None = None
    """Files of any kind for `$TESTS_DIR`, staged before those in `tests`."""
    verify_env: dict[str, str] = {}
    """Further environment of verify commands."""
    checks: tuple[Check, ...] = ()
    """Test frameworks to run after the agent is gone; the reward is the share of expected tests that passed."""
    test_script: str = ""
    """One bash verifier; staged as `tests/test.sh` after the agent; it writes its reward to `$REWARD_FILE`."""
    verify_in: Literal["box", "fresh"] = "box"
    """`box`: the same box, everything outside the workdir put back as setup left it. `fresh`: a new box that gets
    nothing but the workdir."""
    keep: tuple[str, ...] = ()
    """Further paths below the home directory that verification sees as the agent left them."""
    restore: tuple[str, ...] | None = None
    """Paths in the workdir or `keep` (relative: to the workdir) that are put back as setup left them before anything is
    judged; what setup had not made there is removed. None: those parts of a `.git` of setup's that make git run
    programs (`config`, `hooks`, `info`, ...), and files of setup's that are tests by their names."""
    isolate: bool = False
    """The verifier does not see the workdir: what it wants of the agent's work it asks for through the launcher
    `untrusted`. No code under test can then run in the verifier's reach, and the reward's trust is `isolated`."""
    reward_from: RewardFrom | None = None
    """Where the verifier's number is: in `reward.txt` (`$REWARD_FILE`), in `reward.json` beside it, or the share of
    `commands` that passed; `harbor`: by Harbor's rules. None: a reward file where there is one and nothing contradicts
    it, else the commands."""
    seal_tests: bool = True
    """Nothing can change `$TESTS_DIR` while verification runs. False: for verifiers that build something in there."""
    guards: bool = True
    """Scripts of the agent's that a plain verifier starts by `python3` or `node` are launched as the judged, test
    runners import Python's own modules, and code under test that ends their process has failed. False: where such
    scripts share /tmp or the home directory with their verifier."""
    verifier: str = ""
    """Python source of a function `verify(before, after)`. Where the job names a remote environment that runs
    verifiers, it is run there, beside its data, after the agent is gone; what it gives is the reward."""
    environment_seed: int | None = None
    """The job's remote environment is reset with it."""
    limits: Limits = Limits()
    """How much the rollout may use."""
    solution: tuple[ScriptedTurn, ...] = ()
    """What the endpoint `scripted` answers on this task, turn by turn; the agent `oracle` does what it says."""
    solution_script: str = ""
    """A bash script that solves the task: what the agent `oracle` runs instead of the turns of `solution`."""
    solution_patch: str = ""
    """A patch of the workdir that solves the task, as `git diff` writes it; the agent `oracle` applies it first."""

    solution_tree: FileTree | None = None
    """Files of the solution: staged in a folder `solution` beside the tests' own when the agent `oracle` works."""

    @property
    def top(self) -> str:
        """Its paths lie below this folder."""
        return "/" if self.paths == "system" else HOME

    @property
    def tests_dir(self) -> str:
        """`$TESTS_DIR`."""
        return str(PurePosixPath(self.top, "tests"))

    @property
    def solution_dir(self) -> str:
        """Where the oracle finds the files of the solution."""
        return str(PurePosixPath(self.top, "solution"))

    @property
    def reward_dir(self) -> str:
        """Where the verifier leaves its reward."""
        return str(PurePosixPath(self.top, "logs/verifier"))

    @property
    def work_paths(self) -> tuple[str, ...]:
        """The workdir and what else is kept, as far as it can be told apart from the system."""
        return (self.workdir, *(path for path in self.keep if path != "/"))

    @property
    def all_trees(self) -> tuple[FileTree, ...]:
        """Every archive that it refers to."""
        beside = (self.tests_tree, self.solution_tree)
        return (*self.trees.values(), *(tree for tree in beside if tree is not None))

    @field_validator("instruction")
    @classmethod
    def _instruction_says_something(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("the instruction is empty: say what the agent should do")
        return text

    @field_validator("files", "tests")
    @classmethod
    def _files_below_home(cls, files: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        # A workdir that is wrong itself is not there.
        rooted = info.data.get("paths") == "system"
        tests = "/tests" if rooted else TESTS_DIR
        folder, top = tests if info.field_name == "tests" else info.data.get("workdir", HOME), "/" if rooted else HOME
        for path in files:
            if PurePosixPath(resolve_box_path(path, folder, top=top)).is_relative_to(PROGRAMS):
                raise ValueError(f"{path!r} lies in {PROGRAMS}, where the agent's own program is; choose another path")
        return files

    @field_validator("restore")
    @classmethod
    def _restored_is_shared(cls, paths: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        workdir, top = info.data.get("workdir", HOME), "/" if info.data.get("paths") == "system" else HOME
        for path in paths or ():
            place = PurePosixPath(resolve_box_path(path, workdir, top=top))
            if not any(place.is_relative_to(folder) for folder in (workdir, *info.data.get("keep", ()))):
                raise ValueError(f"{path!r} is neither in the workdir nor in `keep`; elsewhere all is put back anyhow")
        return paths

    @field_validator("reward_from")
    @classmethod
    def _has_a_source(cls, source: RewardFrom | None, info: ValidationInfo) -> RewardFrom | None:
        verify, script = info.data.get("verify", ("?",)), info.data.get("test_script", "?")
        if source == "commands" and (script or not verify):
            raise ValueError("`commands` wants `verify`, and no `test_script`, which writes a reward of its own")
        if source and not verify and not script:
            raise ValueError(f"there is nothing that could write {source}: give `verify` or `test_script`")
        return source

    @field_validator("workdir", "keep", mode="after")
    @classmethod
    def _below_home(cls, value: str | tuple[str, ...], info: ValidationInfo) -> str | tuple[str, ...]:
        for path in (value,) if isinstance(value, str) else value:
            pure = PurePosixPath(path)
            if info.data.get("paths") == "system":
                _check_system_path(path, pure, whole=info.field_name == "keep")
                continue
            if ".." in pure.parts or PurePosixPath(HOME) not in pure.parents or str(pure) != path:
                raise ValueError(f"{path!r} must be a plain absolute path below {HOME}, not {HOME} itself")
            if any(pure.is_relative_to(taken) for taken in (TESTS_DIR, LOGS_DIR)):
                raise ValueError(f"{path!r} lies where verification puts its own files; choose another folder")
        return value


def _check_system_path(path: str, pure: PurePosixPath, *, whole: bool) -> None:
    taken = (*SYSTEM_OWN, "/tests", "/logs", PROGRAMS)
    if not pure.is_absolute() or ".." in pure.parts or str(pure) != path or (path == "/" and not whole):
        raise ValueError(f"{path!r} must be a plain absolute path" + ("" if whole else ", not / itself"))
    if any(pure.is_relative_to(place) for place in taken):
        raise ValueError(f"{path!r} lies where the box or verification puts its own files; choose another folder")


class Sampling(Value):
    """How the model samples; None leaves it to the agent and the engine."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature."""
    seed: int | None = None
    """Sampling seed."""
    top_logprobs: int = Field(default=5, ge=0, le=20)
    """Alternatives asked for per token."""
    thinking: bool | None = None
    """Whether the chat template may think; None means the model's own default."""
    history: Literal["as_sent", "exact"] = "as_sent"
    """`exact`: prompts begin with the ids of earlier turns as they were sampled, where the engine allows it."""
    keep_reasoning: bool = True
    """With `exact`: false starts anew from the template's prompt where the template leaves old reasoning out."""
    extra_body: JsonObject = {}
    """Further fields put into every request as they are."""


class Proxies(Value):
    """Through whom models are reached; empty where directly."""

    https: str = ""
    """`HTTPS_PROXY`, or `ALL_PROXY`: for models that speak TLS."""
    http: str = ""
    """`HTTP_PROXY`, or `ALL_PROXY`: for others."""
    none_for: tuple[str, ...] = ()
    """`NO_PROXY`: hosts, domains and all below them, networks, `host:port`, or `*`."""


class Endpoint(Value):
    """A model behind an OpenAI-compatible address."""

    base_url: str
    """Address up to and including `/v1`."""
    model: str
    """The model's name there."""
    key: SecretStr = Field(default=SecretStr(""), exclude=True)
    """The real key. It stays in this process: never stored, logged, shown, or handed to a box."""
    kind: str = "custom"
    """The catalog entry it came from."""
    sampling: Sampling = Sampling()
    """How it samples."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {url!r} must start with http:// or https://")
        return url.rstrip("/")


NO_MODEL = Endpoint(base_url="http://no.model.invalid/v1", model="none", kind="none")
"""What stands in a job whose agent asks no model: nobody checks it, and whoever calls it all the same gets an error."""
BASE: Literal["base"] = "base"
"""The image with the base system in it."""
System = Literal["host", "base"]
"""What a box shows beside its home: this machine's own programs, or those of the base system."""


class SandboxSpec(Value):
    """What kind of box a rollout wants."""

    backend: str = "local"
    """`local`, `container` or `e2b`."""
    template: str = ""
    """Name of a prebaked image of that backend."""
    system: System | None = None
    """`base`: a Debian system of our own, the same on every machine. None: what this machine is set to, in a runner;
    its own system, in a bare provider."""
    writable_system: bool = False
    """Everything in the box can be written and not just its home, within `disk_mb`; its commands see themselves as
    root, at home in /root. Outside they are the same ordinary user. Local boxes only."""
    env: dict[str, str] = {}
    """Given to every command of the box, over what its image sets. Local boxes only."""
    memory_mb: int = Field(default=4096, ge=64)
    """Memory of all processes together (needs cgroups); each process alone is always bounded."""
    disk_mb: int = Field(default=1024, ge=1)
    """What may be written below the home directory."""
    tmp_mb: int = Field(default=256, ge=1)
    """What may be written in /tmp and /dev/shm each."""
    file_mb: int = Field(default=1024, ge=1)
    """Size of one file."""
    pids: int = Field(default=256, ge=8)
    """Processes and threads at once."""
    cpus: float | None = Field(default=None, gt=0)
    """CPU time per second of wall time (needs cgroups); None means no cap."""
    setup_hosts: tuple[str, ...] = ()
    """Host names setup commands may reach through the allow-listing proxy; empty means no network at all. `packages`
    stands for the package indexes that this machine is configured with."""
    verify_hosts: tuple[str, ...] = ()
    """The same for verify commands. What they fetch decides the reward, and what the agent left may fetch as well."""


class AgentSpec(Value):
    """Which agent works on the task, and how it is configured."""

    name: str = "opencode"
    """The agent CLI."""
    driver: str = ""
    """How it is driven, where it knows more than one way (`run`, `serve`); empty: its own default."""
    system_prompt: str = ""
    """Replaces the agent's own system prompt."""
    enabled_tools: tuple[str, ...] | None = None
    """Only these tools are offered to the model; None means all."""
    disabled_tools: tuple[str, ...] = ()
    """These are not offered."""
    config: JsonObject = {}
    """Merged into the agent's own configuration file, last."""
    env: dict[str, str] = {}
    """Further environment of the agent process."""

    @field_validator("disabled_tools")
    @classmethod
    def _one_way_or_the_other(cls, tools: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        both = set(info.data.get("enabled_tools") or ()) & set(tools)
        if both:
            raise ValueError(f"{', '.join(sorted(both))} both enabled and disabled")
        return tools


class Job(Value):
    """Everything one rollout needs to know: the one argument that replaces fifteen."""

    task: Task
    """What to do and how to judge it."""
    model: Endpoint
    """Who thinks."""
    agent: AgentSpec = AgentSpec()
    """Who acts."""
    sandbox: SandboxSpec = SandboxSpec()
    """Where."""
    environment: str = ""
    """A remote environment whose tools the agent gets and which gives the reward: `fleet:KEY`,
    `openenv:http://host:port` or `mcp:http://host:port/mcp`; empty: none."""
    mode: Literal["transparent_proxy", "black_box"] = "transparent_proxy"
    """`black_box`: the agent's calls are relayed and not recorded."""
    group_id: Identifier = ""
    """The caller's own name for the rollouts that belong together."""
    policy_version: Identifier = ""
    """The caller's own name for the weights that are sampled."""
    metadata: Metadata = {}
    """The caller's own JSON."""


class GroupPlace(Value):
    """A rollout's place among those that were started with it."""

    index: int = 0
    """Its number, from 0."""
    size: int = 0
    """How many they are."""
    min_usable: int = 0
    """With so many usable ones the group has enough, and the rest is stopped; 0: all run to their end."""


class BatchPlace(Value):
    """A rollout's place in a batch: tasks x models x agents x samples."""

    name: str
    """The batch."""
    cell: str
    """Which of its combinations, as a digest of task, model and agent, and the number of the sample."""
    task: str
    """The task's id in the batch."""
    digest: str
    """What the task said: its digest."""
    model: str
    """The model, as it was named."""
    agent: str
    """The agent."""
    sample: int
    """The number of the sample, from 1."""
    attempt: int = 1
    """1, and one more each time that what came before was no result."""


class Origin(Value):
    """The rollout whose recorded answers this one was given."""

    rollout_id: str
    """That rollout."""
    how: Literal["replay", "fork"] = "replay"
    """`replay`: all its answers; `fork`: those before a turn, and a live model from there on."""
    turn: int | None = None
    """For a fork: the first turn, from 1, that was not answered from the record."""
    edited: bool = False
    """For a fork: whether the answer of that turn was given by hand, and the model spoke after it."""


ScriptedTurn.model_rebuild()
