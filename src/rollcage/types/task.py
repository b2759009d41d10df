"""A piece of work and how to judge it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
)

from rollcage.types.base import HOME, LOGS_DIR, PROGRAMS, TESTS_DIR, Identifier, Value
from rollcage.types.check import Check
from rollcage.types.outcome import RewardFrom
from rollcage.types.scripted import ScriptedTurn


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


class Artifact(Value):
    """A part of the agent's work that a verifier with a box of its own gets."""

    source: str
    """A file or a folder in the agent's box; it is at the same place in the verifier's."""
    exclude: tuple[str, ...] = ()
    """Patterns of what is left out, as `tar --exclude` reads them."""


class Collect(Value):
    """A bash command in the agent's box, after the agent and before anything is judged; it may fail."""

    command: str
    timeout_s: float = Field(default=60, gt=0)
    user: str = ""
    """Whom it sees itself as; empty: root."""


class McpServer(Value):
    """An MCP server that a task brings along: a command in its box, or an address there where one listens."""

    name: str
    command: str = ""
    """Started in the box for as long as the agent works; it speaks on its standard streams."""
    args: tuple[str, ...] = ()
    url: str = ""
    """Where one listens in the box, by streamable HTTP; the agent is sent there itself."""


class VerifierBox(Value):
    """The box of a verifier that judges apart from where the agent worked: it gets the artifacts, and nothing else."""

    template: str = ""
    """Its image; empty: none, as where the agent's has none."""
    workdir: str
    """Where the verifier starts."""
    env: dict[str, str] = {}
    """For every command in it."""
    memory_mb: int | None = Field(default=None, ge=64)
    disk_mb: int | None = Field(default=None, ge=1)
    cpus: float | None = Field(default=None, gt=0)
    """None: as the agent's box has it."""
    has_tests: bool = False
    """Its image brings the tests: none are staged."""
    artifacts: tuple[Artifact, ...] = ()
    """What of the agent's work it gets."""


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
    more_tests: tuple[FileTree, ...] = ()
    """Further such files, staged over those."""
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
    collect: tuple[Collect, ...] = ()
    """What is done in the agent's box after the agent, before anything is judged."""
    agent_user: str = ""
    """Whom the agent's commands see themselves as, by name or number, in boxes whose system can be written.
    Empty: root."""
    verify_user: str = ""
    """The same for verify commands."""
    mcp_servers: tuple[McpServer, ...] = ()
    """MCP servers in the box, whose tools the agent is offered."""
    verifier_box: VerifierBox | None = None
    """The verifier's own box. None: it judges where the agent worked, or as `verify_in` says."""
    steps: tuple[Step, ...] = ()
    """Several tasks one after the other in one box, each with a verdict of its own; the rest of this task says what
    holds for all of them. Only where `paths` is `system`."""
    step_reward: Literal["mean", "final"] = "mean"
    """What steps earn together: the mean by name of what each earned, or what the last one did."""

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
        beside = (self.tests_tree, *self.more_tests, self.solution_tree)
        of_steps = (tree for step in self.steps for tree in step.task.all_trees)
        return (*self.trees.values(), *(tree for tree in beside if tree is not None), *of_steps)

    @property
    def verifier_boxes(self) -> tuple[VerifierBox, ...]:
        """Every box that its verifiers have of their own."""
        of_steps = (box for step in self.steps for box in step.task.verifier_boxes)
        return (*((self.verifier_box,) if self.verifier_box else ()), *of_steps)

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

    @field_validator("steps")
    @classmethod
    def _steps_of_one_system(cls, steps: tuple[Step, ...], info: ValidationInfo) -> tuple[Step, ...]:
        if steps and info.data.get("paths") != "system":
            raise ValueError('several steps need `paths = "system"`')
        return steps

    @field_validator("restore")
    @classmethod
    def _restored_is_shared(cls, paths: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        workdir, top = info.data.get("workdir", HOME), "/" if info.data.get("paths") == "system" else HOME
        for path in paths or ():
            place = PurePosixPath(resolve_box_path(path, workdir, top=top))
            if not any(place.is_relative_to(folder) for folder in (workdir, *info.data.get("keep", ()))):
                raise ValueError(f"{path!r} is neither in the workdir nor in `keep`; elsewhere all is put back anyhow")
        return paths

    @field_validator("isolate")
    @classmethod
    def _has_a_system_of_its_own(cls, isolate: bool, info: ValidationInfo) -> bool:
        if isolate and "/" in info.data.get("keep", ()):
            raise ValueError("with `keep = [\"/\"]` the verifier's own programs are the agent's work: keep less")
        return isolate

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


class Step(Value):
    """One of several tasks in one box."""

    name: str
    task: Task
    """Its instruction, files, setup, verifier, solution, and time."""
    min_reward: dict[str, float] = {}
    """What must have been earned at least, by name, for the next step to begin. What is not earned is less."""


ScriptedTurn.model_rebuild()
Task.model_rebuild()
