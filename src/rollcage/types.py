"""The values everything else speaks in: what goes into a rollout and what comes out of it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator, model_validator

HOME = "/home/user"
"""The agent's home directory in every box, whatever the backend: equal paths make equal prompts."""

TESTS_DIR = f"{HOME}/tests"
"""Where a task's tests are staged, after the agent is gone."""
LOGS_DIR = f"{HOME}/logs"
"""Where the verifier leaves its reward."""

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
    """How a rollout ended. Only the first four can carry a reward."""

    SUCCEEDED = "succeeded"
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
        return self in (Outcome.SUCCEEDED, Outcome.AGENT_TIMEOUT, Outcome.AGENT_FAILED, Outcome.LIMIT_REACHED)


class Purpose(StrEnum):
    """What the agent made a model call for; trainers leave out what is not the policy."""

    AGENT = "agent"
    TITLE = "title"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"


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
    request: JsonObject
    """The request body exactly as it was sent upstream. Of a call that failed, after too many bytes of such, only
    `not_kept`: size, SHA-256 and beginning."""
    message: JsonObject = {}
    """The assistant message, assembled from the answer."""
    prompt_ids: tuple[int, ...] = ()
    """The engine's own ids of the whole prompt; empty where the engine does not tell."""
    tokens: tuple[Token, ...] = ()
    """Every sampled token in order, the end token included."""
    finish_reason: str | None = None
    """Why generation ended; null for a turn that was cut."""
    usage: JsonObject = {}
    """The engine's own count."""
    status: int = 0
    """HTTP status of the upstream's answer; 0 where none came."""
    error: str | None = None
    """What broke, in one line; null for a whole turn."""
    trainable: bool = False
    """Ids and logprobs are complete and agree with the engine's own count."""
    untrainable_reason: str = ""
    """Why not, where not."""
    streamed: bool = True
    """Whether the agent got this turn as a stream."""
    started_at: float = 0.0
    """Unix time at which the agent's request had arrived."""
    first_token_s: float | None = None
    """Seconds until the first token of the answer."""
    seconds: float = 0.0
    """Seconds from the agent's request to the end of the answer."""


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


class Reward(Value):
    """What a rollout earned: a total, and named parts where the verifier gave them."""

    total: float
    """The number trainers use."""
    parts: dict[str, float] = {}
    """Named components: from `reward.json`, and `verify` where a remote environment gave the total."""
    source: Literal["reward_file", "reward_json", "commands", "environment"] = "commands"
    """Where the number came from."""


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
    """The fault above happens this many times, then the next turn of the script answers in its place; null: always."""


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
    """One deadline for everything, boot and scoring included; null: the sum of the parts and a minute for the boot."""
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


def placed(path: str, folder: str) -> str:
    """Where a path a task names lies in the box: relative to `folder`, and always below the home directory."""
    pure = PurePosixPath(folder, path)
    if ".." in pure.parts or not pure.is_relative_to(HOME) or pure == PurePosixPath(folder) or "\0" in path:
        raise ValueError(f"{path!r} does not name a file below {HOME}")
    return str(pure)


class Task(Value):
    """A piece of work and how to judge it."""

    id: Identifier = ""
    """The caller's own name for it; echoed back."""
    instruction: str
    """The prompt for the agent, handed over verbatim."""
    workdir: str = f"{HOME}/workdir"
    """Where the agent starts, and what verification sees of its work."""
    files: dict[str, str] = {}
    """`{path: text}`, staged before setup; a relative path is relative to the workdir."""
    setup: tuple[str, ...] = ()
    """Bash commands run before the agent, in order; the first that fails ends the rollout."""
    verify: tuple[str, ...] = ()
    """Bash commands run after the agent is gone."""
    tests: dict[str, str] = {}
    """`{path: text}`, staged in `$TESTS_DIR` only after the agent is gone."""
    test_script: str = ""
    """One bash verifier; staged as `tests/test.sh` after the agent; it writes its reward to `$REWARD_FILE`."""
    verify_in: Literal["box", "fresh"] = "box"
    """`box`: the same box, everything outside the workdir put back as setup left it. `fresh`: a new box that gets
    nothing but the workdir."""
    keep: tuple[str, ...] = ()
    """Further paths below the home directory that verification sees as the agent left them."""
    verifier: str = ""
    """Python source of a function `verify(before, after)`. Where the job names a remote environment that runs
    verifiers, it is run there, beside its data, after the agent is gone; what it gives is the reward."""
    environment_seed: int | None = None
    """The job's remote environment is reset with it."""
    limits: Limits = Limits()
    """How much the rollout may use."""
    solution: tuple[ScriptedTurn, ...] = ()
    """What the endpoint `scripted` answers on this task, turn by turn."""

    @field_validator("instruction")
    @classmethod
    def _instruction_says_something(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("instruction is empty: say what the agent should do")
        return text

    @model_validator(mode="after")
    def _files_below_home(self) -> Self:
        for name, folder, files in (("files", self.workdir, self.files), ("tests", TESTS_DIR, self.tests)):
            for path in files:
                try:
                    placed(path, folder)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        return self

    @field_validator("workdir", "keep", mode="after")
    @classmethod
    def _below_home(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for path in (value,) if isinstance(value, str) else value:
            pure = PurePosixPath(path)
            if ".." in pure.parts or PurePosixPath(HOME) not in pure.parents or str(pure) != path:
                raise ValueError(f"{path!r} must be a plain absolute path below {HOME}, not {HOME} itself")
            if any(pure.is_relative_to(taken) for taken in (TESTS_DIR, LOGS_DIR)):
                raise ValueError(f"{path!r} lies where verification puts its own files; choose another folder")
        return value


class Sampling(Value):
    """How the model samples; null leaves it to the agent and the engine."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature."""
    seed: int | None = None
    """Sampling seed."""
    top_logprobs: int = Field(default=5, ge=0, le=20)
    """Alternatives asked for per token."""
    thinking: bool | None = None
    """Whether the chat template may think; null means the model's own default."""
    extra_body: JsonObject = {}
    """Further fields put into every request as they are."""


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


class SandboxSpec(Value):
    """What kind of box a rollout wants."""

    backend: str = "local"
    """`local`, `container` or `e2b`."""
    template: str = ""
    """Name of a prebaked image of that backend."""
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
    """CPU time per second of wall time (needs cgroups); null means no cap."""
    setup_hosts: tuple[str, ...] = ()
    """Host names setup commands may reach through the allow-listing proxy; empty means no network at all."""


class AgentSpec(Value):
    """Which agent works on the task, and how it is configured."""

    name: str = "opencode"
    """The agent CLI."""
    driver: str = ""
    """How it is driven, where it knows more than one way (`run`, `serve`); empty: its own default."""
    system_prompt: str = ""
    """Replaces the agent's own system prompt."""
    enabled_tools: tuple[str, ...] | None = None
    """Only these tools are offered to the model; null means all."""
    disabled_tools: tuple[str, ...] = ()
    """These are not offered."""
    config: JsonObject = {}
    """Merged into the agent's own configuration file, last."""
    env: dict[str, str] = {}
    """Further environment of the agent process."""


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

    @model_validator(mode="after")
    def _tools_are_one_way_or_the_other(self) -> Self:
        both = set(self.agent.enabled_tools or ()) & set(self.agent.disabled_tools)
        if both:
            raise ValueError(f"agent: {', '.join(sorted(both))} both enabled and disabled")
        return self


ScriptedTurn.model_rebuild()
