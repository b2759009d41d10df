"""Reads a task folder in Harbor's format, schema 1.0 to 1.4, exactly as it lies there; what cannot run here is refused
by name. The older task.yaml of Terminal-Bench 1 is read, too."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollcage.errors import TaskError
from rollcage.tasks.files import TaskFile, text_of
from rollcage.tasks.trees import tree_of
from rollcage.types import JsonObject, Limits, SandboxSpec, Task

CONFIG, OLD_CONFIG = "task.toml", "task.yaml"
NAME = "harbor"
"""The names of images of such tasks begin with it."""
DISK_MB = 2048
"""What may be written in the box, unless the task says."""
_WORKDIR = "/app"
_CANARY = re.compile(r"^\s*(<!--|#|//)?.*\bcanary\b.*$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_ROOT = (None, "", "root", 0, "0")
_HEALTHCHECK = """sleep {start}; for try in $(seq {tries}); do
  timeout {timeout} bash -c {command} && exit 0; sleep {pause}
done; echo 'the healthcheck of [environment] never passed' >&2; exit 1"""


class _Table(BaseModel):
    """A table of task.toml: what we know of it; the rest is listed and ignored."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Healthcheck(_Table):
    """`[environment.healthcheck]`: asked before the agent starts."""

    command: str
    interval_sec: float = 5
    timeout_sec: float = 30
    start_period_sec: float = 0
    start_interval_sec: float = 5
    retries: int = 3


class Environment(_Table):
    """`[environment]`."""

    build_timeout_sec: float = 600
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = 0
    gpu_types: list[str] | None = None
    tpu: object = None
    mcp_servers: list[JsonObject] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: list[str] = []
    allow_internet: bool | None = None


class AgentTable(_Table):
    """`[agent]`."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] = []


class Verifier(_Table):
    """`[verifier]`."""

    timeout_sec: float = 600
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] = []
    environment_mode: str | None = None
    environment: JsonObject | None = None
    collect: list[JsonObject] = []


class Solution(_Table):
    """`[solution]`."""

    env: dict[str, str] = {}


class Config(_Table):
    """task.toml."""

    schema_version: str | None = None
    version: str | None = None
    task: JsonObject = {}
    metadata: JsonObject = {}
    environment: Environment = Environment()
    agent: AgentTable = AgentTable()
    verifier: Verifier = Verifier()
    solution: Solution = Solution()
    artifacts: list[object] = []
    steps: list[JsonObject] = []
    multi_step_reward_strategy: str | None = None
    source: object = None


class OldConfig(_Table):
    """task.yaml."""

    instruction: str
    max_agent_timeout_sec: float = Field(default=600, gt=0)
    max_test_timeout_sec: float = Field(default=300, gt=0)
    parser_name: str = "pytest"
    run_tests_in_same_shell: bool = False
    disable_asciinema: bool = False
    author_name: object = None
    author_email: object = None
    difficulty: object = None
    category: object = None
    tags: object = None


def is_folder_task(folder: Path) -> bool:
    """Whether a folder is a task in this format."""
    return folder.is_dir() and any((folder / name).is_file() for name in (CONFIG, OLD_CONFIG))


def load_folder(folder: Path) -> TaskFile:
    """The task in a folder; TaskError with one line per problem, each with its file, where it cannot be used here."""
    if (folder / CONFIG).is_file():
        return _Reader(folder).read()
    if (folder / OLD_CONFIG).is_file():
        return _Reader(folder).read_old()
    raise TaskError(f"{folder}: there is neither {CONFIG} nor {OLD_CONFIG} in this folder")


def image_name(context: Path) -> str:
    """What the image of a build folder is called: by its content, so that the same one is built once."""
    return f"{NAME}-{tree_of(context).digest[:24]}"


def template_of(image: str) -> str:
    """What an image that a task names is called here, once it was imported."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", image).strip("-.")[-64:]


def strip_canary(text: str) -> str:
    """An instruction without the lines at its start that mark a public task: they are not for the agent."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.match(lines[0])):
        lines.pop(0)
    return "\n".join(lines)


class _Reader:
    """Turns a folder into a task, collecting what is wrong on the way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: list[str] = []
        self._notices: list[str] = []

    def read(self) -> TaskFile:
        place = self._folder / CONFIG
        try:
            data = tomllib.loads(text_of(place, str(place)))
            config = Config.model_validate(data)
        except tomllib.TOMLDecodeError as error:
            raise TaskError(f"{place}: is no valid TOML: {error}") from error
        except ValidationError as error:
            raise TaskError(_complaints(place, error)) from error
        self._unknown(place, config)
        self._refuse(place, config)
        instruction = self._instruction()
        tests = self._needed("tests/test.sh", "the verifier")
        environment = config.environment
        limits = Limits(
            agent_timeout_s=config.agent.timeout_sec or Limits().agent_timeout_s,
            verify_timeout_s=config.verifier.timeout_sec,
        )
        solved = (self._folder / "solution" / "solve.sh").is_file()
        env = self._values("environment.env", environment.env)
        healthcheck = environment.healthcheck
        task: JsonObject = {
            "instruction": instruction,
            "setup": (_waiting(healthcheck),) if healthcheck else (),
            "tests_tree": self._tree("tests") if tests else None,
            "verify": ("chmod +x /tests/test.sh && { /tests/test.sh; exit 0; }",),
            "reward_from": "harbor",
            "verify_env": self._values("verifier.env", config.verifier.env),
            "solution_tree": self._tree("solution") if solved else None,
            "solution_script": _solving(self._values("solution.env", config.solution.env)) if solved else "",
            "limits": limits,
        }
        context = self._folder / "environment"
        workdir = environment.workdir or self._workdir(context / "Dockerfile")
        template = self._template(context, environment.docker_image)
        sandbox = SandboxSpec(
            template=template,
            disk_mb=environment.storage_mb or _megabytes(environment.storage) or DISK_MB,
            memory_mb=max(64, environment.memory_mb or _megabytes(environment.memory) or SandboxSpec().memory_mb),
            cpus=environment.cpus,
            env=env,
            verify_hosts=tuple(config.verifier.allowed_hosts) if config.verifier.network_mode == "allowlist" else (),
        )
        name = str(config.task.get("name") or self._folder.resolve().name)
        return self._made(name, task, workdir, sandbox)

    def read_old(self) -> TaskFile:
        place = self._folder / OLD_CONFIG
        try:
            config = OldConfig.model_validate(_yaml(place))
        except ValidationError as error:
            raise TaskError(_complaints(place, error)) from error
        if config.parser_name != "pytest":
            self._problems.append(f"{place}: parser_name {config.parser_name!r} is not known here; only pytest is")
        self._compose(self._folder / "docker-compose.yaml")
        script = self._needed("run-tests.sh", "the verifier")
        solved = (self._folder / "solution.sh").is_file()
        if not solved and (self._folder / "solution.yaml").is_file():
            self._notices.append(
                f"{self._folder / 'solution.yaml'}: keys that are typed are no script; there is no oracle"
            )
        task: JsonObject = {
            "instruction": strip_canary(config.instruction),
            "tests_tree": self._tree("tests") if (self._folder / "tests").is_dir() else None,
            "tests": {"run-tests.sh": text_of(script, str(script))} if script else {},
            # pytest ends with 0 where every test passed, and with nothing else does this format score.
            "verify": ("bash /tests/run-tests.sh",),
            "verify_env": {"TEST_DIR": "/tests", "T_BENCH_TEST_DIR": "/tests"},
            "reward_from": "commands",
            "solution_tree": self._tree("solution.sh") if solved else None,
            "solution_script": "bash /solution/solution.sh" if solved else "",
            "limits": Limits(
                agent_timeout_s=config.max_agent_timeout_sec, verify_timeout_s=config.max_test_timeout_sec
            ),
        }
        sandbox = SandboxSpec(template=self._template(self._folder, None), disk_mb=DISK_MB)
        workdir = self._workdir(self._folder / "Dockerfile")
        return self._made(self._folder.resolve().name, task, workdir, sandbox)

    def _made(self, name: str, task: JsonObject, workdir: str, sandbox: SandboxSpec) -> TaskFile:
        if self._problems:
            raise TaskError("\n".join(dict.fromkeys(self._problems)))
        # Harbor's verifier sees everything as the agent left it. What differs from our own tasks stands in the log.
        whole = {"id": name[:200], "paths": "system", "workdir": workdir, "keep": ("/",), "restore": (), **task}
        try:
            made = Task.model_validate({**whole, "seal_tests": False})
        except ValidationError as error:
            raise TaskError(_complaints(self._folder, error)) from error
        return TaskFile(path=self._folder, task=made, sandbox=sandbox, notices=tuple(self._notices))

    def _unknown(self, place: Path, config: Config) -> None:
        tables: dict[str, _Table | None] = {
            "": config,
            "environment.": config.environment,
            "agent.": config.agent,
            "verifier.": config.verifier,
            "solution.": config.solution,
            "environment.healthcheck.": config.environment.healthcheck,
        }
        names = [f"{prefix}{name}" for prefix, table in tables.items() for name in (table and table.model_extra) or ()]
        if names:
            self._notices.append(f"{place}: unknown and ignored: {', '.join(names)}")

    def _refuse(self, place: Path, config: Config) -> None:
        environment, verifier = config.environment, config.verifier
        separate = verifier.environment_mode == "separate" or verifier.environment is not None
        separate = separate or (self._folder / "tests" / "Dockerfile").exists()
        version = config.schema_version or config.version
        known = version is None or re.fullmatch(r"1(\.[0-4])?", str(version))
        wrong = {
            f"schema_version {version!r} is not known here; 1.0 to 1.4 are": not known,
            f"environment.os = {environment.os!r}: boxes are linux": environment.os != "linux",
            f"environment.gpus = {environment.gpus}: boxes have no GPU": bool(environment.gpus),
            "environment.tpu: boxes have no TPU": bool(environment.tpu),
            "environment.mcp_servers: servers beside the box are not started here": bool(environment.mcp_servers),
            "verifier.environment_mode = separate: a verifier with an image of its own is not run here": separate,
            "verifier.collect: it goes with a separate verifier, which is not run here": bool(verifier.collect),
            "steps: tasks of several steps are not run here": bool(config.steps),
            f"agent.user = {config.agent.user!r}: commands see themselves as root": config.agent.user not in _ROOT,
            f"verifier.user = {verifier.user!r}: commands see themselves as root": verifier.user not in _ROOT,
        }
        self._problems += [f"{place}: {what}" for what, so in wrong.items() if so]
        self._compose(self._folder / "environment" / "docker-compose.yaml")
        if environment.network_mode in (None, "public") and environment.allow_internet is not False:
            self._notices.append(f"{place}: the agent has no network here, where Harbor would give it one")
        if environment.skills_dir:
            self._notices.append(f"{place}: environment.skills_dir is ignored")
        if config.artifacts:
            self._notices.append(f"{place}: artifacts are not collected; the verifier sees everything anyhow")

    def _compose(self, path: Path) -> None:
        if not path.exists():
            return
        services = _yaml(path).get("services")
        names = list(services) if isinstance(services, dict) else []
        if len(names) != 1:
            self._problems.append(f"{path}: has the services {', '.join(map(str, names)) or 'none'}; one box is one")

    def _instruction(self) -> str:
        path = self._needed("instruction.md", "what the agent is asked")
        text = strip_canary(text_of(path, str(path))) if path else "-"
        if not text.strip():
            self._problems.append(f"{path}: says nothing")
            return "-"
        return text

    def _needed(self, name: str, what: str) -> Path | None:
        path = self._folder / name
        if path.is_file():
            return path
        self._problems.append(f"{path}: is missing: {what}")
        return None

    def _tree(self, name: str) -> object:
        try:
            return tree_of(self._folder / name)
        except TaskError as error:
            self._problems.append(str(error))
            return None

    def _values(self, where: str, given: Mapping[str, str]) -> dict[str, str]:
        """With `${NAME:-default}` filled in by the default: nothing of this machine's environment goes to a box."""

        def filled(found: re.Match[str]) -> str:
            if found[2] is None:
                why = f"{found[0]} is taken from the machine's environment, which no box gets"
                self._problems.append(f"{self._folder / CONFIG}: {where}: {why}")
            return found[2] or ""

        return {name: _VARIABLE.sub(filled, value) for name, value in given.items()}

    def _template(self, context: Path, docker_image: str | None) -> str:
        if (context / "Dockerfile").is_file():
            try:
                return image_name(context)
            except TaskError as error:
                self._problems.append(str(error))
                return ""
        return template_of(docker_image or "")

    def _workdir(self, dockerfile: Path) -> str:
        """The last WORKDIR of a Dockerfile."""
        found = _WORKDIR
        if not dockerfile.is_file():
            return found
        found = "/root"
        for line in text_of(dockerfile, str(dockerfile)).splitlines():
            words = line.split(None, 1)
            if len(words) == 2 and words[0].upper() == "WORKDIR" and "$" not in words[1]:
                place = words[1].strip().strip("\"'").rstrip("/") or "/"
                found = place if place.startswith("/") else f"{found}/{place}"
            elif words and words[0].upper() == "FROM":
                found = "/root"
        return found if found != "/" else "/root"


def _solving(env: Mapping[str, str]) -> str:
    given = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
    return f"{given}bash /solution/solve.sh"


def _waiting(check: Healthcheck) -> str:
    return _HEALTHCHECK.format(
        start=check.start_period_sec,
        tries=max(1, check.retries),
        timeout=check.timeout_sec,
        command=shlex.quote(check.command),
        pause=check.interval_sec,
    )


def _megabytes(text: str | None) -> int | None:
    """`4G` in megabytes."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT])i?B?\s*", text or "", re.IGNORECASE)
    if found is None:
        return None
    return int(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}[found[2].upper()])


def _yaml(path: Path) -> dict[str, Any]:
    try:
        yaml = import_module("yaml")  # it has no types of its own
    except ImportError as error:
        raise TaskError(f"{path}: reading YAML needs PyYAML: pip install 'rollcage[harbor]'") from error
    text = text_of(path, str(path))
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise TaskError(f"{path}: is no valid YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(data, dict):
        raise TaskError(f"{path}: must hold one mapping")
    return data


def _complaints(place: Path, error: ValidationError) -> str:
    lines = []
    for each in error.errors(include_url=False):
        said = str(each.get("ctx", {}).get("error", each["msg"]))
        lines.append(f"{place}: {'.'.join(map(str, each['loc']))}: {said}")
    return "\n".join(lines)
