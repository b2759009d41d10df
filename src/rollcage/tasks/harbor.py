"""Reads a task folder in Harbor's format, schema 1.0 to 1.4, exactly as it lies there; what cannot run here is refused
by name."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from pydantic import ValidationError

from rollcage.errors import TaskError
from rollcage.tasks import terminal_bench
from rollcage.tasks.files import TaskFile
from rollcage.tasks.harbor_config import (
    ArtifactTable,
    Config,
    HarborEnvironment,
    Healthcheck,
    StepTable,
    Verifier,
    unknown_in,
)
from rollcage.tasks.harbor_files import complaints, megabytes, strip_canary
from rollcage.tasks.harbor_folder import CONFIG, DISK_MB, WORKDIR, FolderReader, user_of
from rollcage.tasks.harbor_images import template_of
from rollcage.tasks.terminal_bench import TerminalBenchReader
from rollcage.types import SYSTEM_OWN, JsonObject, Limits, SandboxSpec

_RUN = "chmod +x {0} && {0}"
_HERE = ("localhost", "127.0.0.1", "main")
_STEP_NAME = re.compile(r"(?!\.{1,2}$)[^/\x00-\x1f]{1,200}")
_VERIFY_S = 600.0
_ARTIFACTS = "/logs/artifacts"
"""What every verifier with a box of its own gets of the agent's."""
_JUDGES_OWN = (*SYSTEM_OWN, "/tests", "/logs/verifier")
_HEALTHCHECK = """failed=0; while true; do
  timeout {timeout} bash -c {command} && exit 0
  if [ $SECONDS -lt {start} ]; then sleep {early}; continue; fi
  failed=$((failed + 1)); [ $failed -lt {tries} ] || break; sleep {pause}
done; echo 'the healthcheck of {where} never passed' >&2; exit 1"""


def is_folder_task(folder: Path) -> bool:
    """Whether a folder is a task in this format."""
    return folder.is_dir() and any((folder / name).is_file() for name in (CONFIG, terminal_bench.CONFIG))


def load_folder(folder: Path) -> TaskFile:
    """The task in a folder; TaskError with one line per problem, each with its file, where it cannot be used here."""
    if (folder / CONFIG).is_file():
        return _HarborReader(folder).read()
    if (folder / terminal_bench.CONFIG).is_file():
        return TerminalBenchReader(folder).read()
    raise TaskError(f"{folder}: there is neither {CONFIG} nor {terminal_bench.CONFIG} in this folder")


class _HarborReader(FolderReader):
    """Reads task.toml and what lies beside it."""

    def read(self) -> TaskFile:
        place = self._folder / CONFIG
        text = self._text = self._read(place)
        try:
            config = Config.model_validate(tomllib.loads(text))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise TaskError(f"{place}: is no valid TOML: {error}") from error
        except ValidationError as error:
            raise TaskError(complaints(place, error, text)) from error
        if unknown := list(unknown_in(config)):
            self._notices.append(f"{place}: unknown and ignored: {', '.join(unknown)}")
        self._refuse(place, config)
        self._ours = config.metadata.rollcage
        environment = config.environment
        context = self._folder / "environment"
        service = self._compose(context / "docker-compose.yaml")
        self._image_name, self._env = environment.docker_image or service.image, service.env
        self._work_in(context, environment.workdir, self._image_name)
        checks = (_waiting(environment.healthcheck, "[environment]"),) if environment.healthcheck else ()
        task = self._in_steps(config) if config.steps else self._piece(config)
        task["setup"] = (*checks, *task.get("setup", ()))
        sandbox = SandboxSpec(
            template=self._template(context, self._image_name),
            disk_mb=environment.storage_mb or megabytes(environment.storage) or DISK_MB,
            memory_mb=max(64, environment.memory_mb or megabytes(environment.memory) or SandboxSpec().memory_mb),
            cpus=environment.cpus,
            env=self._env | self._values("environment.env", environment.env),
            verify_hosts=tuple(config.verifier.allowed_hosts) if config.verifier.network_mode == "allowlist" else (),
        )
        name = str(config.task.get("name") or self._folder.resolve().name)
        return self._made(name, task, sandbox)

    def _piece(self, config: Config, step: StepTable | None = None) -> JsonObject:
        """What is asked and how it is judged: of a task, or of one of its steps."""
        below = f"steps/{step.name}/" if step else ""
        agent_s = (step.agent.timeout_sec if step else None) or config.agent.timeout_sec
        verify_s = (step.verifier.timeout_sec if step else None) or config.verifier.timeout_sec
        limits = Limits(agent_timeout_s=agent_s or Limits().agent_timeout_s, verify_timeout_s=verify_s or _VERIFY_S)
        given = {**config.verifier.env, **(step.verifier.env if step else {})}
        collect = [*config.verifier.collect, *(step.verifier.collect if step else ())]
        piece: JsonObject = {
            "instruction": self._instruction(below),
            "verify": (f"{_RUN.format('/tests/test.sh')}; exit 0",),
            "reward_from": "harbor",
            "verify_env": self._values("verifier.env", given),
            "collect": tuple(
                {"command": each.command, "timeout_s": each.timeout_sec, "user": user_of(each.user)} for each in collect
            ),
            "agent_user": user_of(step.agent.user if step else None, config.agent.user, self._image_user),
            "verify_user": user_of(
                step.verifier.user if step else None,
                config.verifier.user,
                self._judges_user(config, step, below),
            ),
            "mcp_servers": self._servers(config.environment),
            "limits": limits,
            **self._judge(config, step, below),
        }
        why = "the verifier reaches only what --verify-hosts allows"
        self._note_network(f"{below}tests/test.sh", why, context=self._verifier_context(f"{below}tests"))
        solutions = [name for name in (f"{below}solution", "solution") if (self._folder / name / "solve.sh").is_file()]
        if solutions:
            self._note_network(f"{solutions[0]}/solve.sh", "the agent, and so its solution, has no network here")
            piece["solution_tree"] = self._tree(solutions[0])
            piece["solution_script"] = _solving(self._values("solution.env", config.solution.env))
        if step:
            files = self._folder / below / "workdir"
            piece["trees"] = {".": self._tree(f"{below}workdir")} if files.is_dir() else {}
            ready = (_waiting(step.healthcheck, f"the step {step.name}"),) if step.healthcheck else ()
            piece["setup"] = (*(("bash ./setup.sh",) if (files / "setup.sh").is_file() else ()), *ready)
        return piece

    def _judges_user(self, config: Config, step: StepTable | None, below: str) -> str:
        """As whom the image of the verifier's box has it run."""
        own = self._dockerfile(self._verifier_context(f"{below}tests")) if _is_separate(config, step) else None
        return user_of(own.user) if own else self._image_user

    def _judge(self, config: Config, step: StepTable | None, below: str) -> JsonObject:
        """The tests, and the verifier's own box where it has one."""
        box = self._verifier_box(config, step, below) if _is_separate(config, step) else None
        if box and box["has_tests"]:
            return {"verifier_box": box}
        names = dict.fromkeys(("tests", f"{below}tests"))
        if not any((self._folder / name / "test.sh").is_file() for name in names):
            self._needed(f"{below}tests/test.sh", "the verifier")
            return {}
        trees = [self._tree(name) for name in names if (self._folder / name).is_dir()]
        return {"tests_tree": trees[0], "more_tests": tuple(trees[1:]), "verifier_box": box}

    def _verifier_context(self, tests: str) -> Path:
        places = (self._folder / tests, self._folder / "tests", self._folder / "environment")
        return next((each for each in places if (each / "Dockerfile").is_file()), places[-1])

    def _verifier_box(self, config: Config, step: StepTable | None, below: str) -> JsonObject:
        tables: list[tuple[Verifier, Path]] = [(config.verifier, self._folder / "tests")]
        if step:
            tables.insert(0, (step.verifier, self._folder / below / "tests"))
        resources = next((each.environment for each, _ in tables if each.environment), config.environment)
        template, workdir = self._template(self._folder / "environment", self._image_name), ""
        has_tests, env = False, self._env if resources is config.environment else {}
        for table, context in tables:
            service = self._compose(context / "docker-compose.yaml")
            image = table.environment.docker_image if table.environment else None
            if image or service.image or (context / "Dockerfile").is_file():
                template = template_of(image) if image else self._template(context, service.image)
                own = self._dockerfile(context)
                has_tests, workdir, env = True, own.workdir if own else WORKDIR, service.env
                break
        place = resources.workdir or workdir or self._workdir
        if self._ours.isolate and (PurePosixPath(place).is_relative_to("/tests") or place == "/"):
            what = (
                f"isolate = true: the verifier works in {place}, where its tests are; give it a workdir apart from them"
            )
            self._problems.append(f"{self._at('metadata.rollcage.isolate')}: {what}")
        return {
            "template": template,
            "has_tests": has_tests,
            "workdir": place,
            "env": env | self._values("verifier.environment.env", resources.env),
            "memory_mb": resources.memory_mb or megabytes(resources.memory),
            "disk_mb": resources.storage_mb or megabytes(resources.storage),
            "cpus": resources.cpus,
            "artifacts": self._artifacts([*config.artifacts, *(step.artifacts if step else ())]),
        }

    def _servers(self, environment: HarborEnvironment) -> tuple[JsonObject, ...]:
        """What runs in the box itself; what would run beside it, or needs a network, is refused."""
        found: list[JsonObject] = []
        by_address = [server for server in environment.mcp_servers if server.transport != "stdio"]
        for server in environment.mcp_servers:
            what, why = f"environment.mcp_servers: {server.name!r}", ""
            if server.transport == "stdio":
                why = "" if server.command else "is no command"
            elif server.transport == "sse":
                why = "speaks SSE, which MCP has given up; use streamable-http or stdio"
            elif urlsplit(server.url or "").hostname not in _HERE:
                why = f"is at {server.url!r}; a box reaches itself alone, and nothing runs beside it"
            elif by_address[1:] or len(environment.mcp_servers) > 1:
                why = "is at an address, beside other servers; one at an address stands alone"
            if why:
                self._problems.append(f"{self._at('environment.mcp_servers')}: {what} {why}")
            found.append({"name": server.name, "command": server.command or "", "args": tuple(server.args)})
            found[-1]["url"] = "" if server.transport == "stdio" else server.url or ""
        return tuple(found)

    def _artifacts(self, given: Sequence[str | ArtifactTable]) -> tuple[JsonObject, ...]:
        found: dict[str, JsonObject] = {_ARTIFACTS: {"source": _ARTIFACTS}}
        for each in given:
            entry = ArtifactTable(source=each) if isinstance(each, str) else each
            source = PurePosixPath(self._workdir, entry.source)
            taken = [place for place in _JUDGES_OWN if source.is_relative_to(place) or _holds(source, place)]
            if ".." in source.parts or taken:
                why = f"{taken[0]} is the box's or the verifier's own" if taken else "`..` leads elsewhere"
                self._problems.append(f"{self._at('artifacts')}: artifacts: {entry.source!r} is not taken: {why}")
            if entry.service not in (None, "main"):
                self._problems.append(
                    f"{self._at('artifacts')}: artifacts: of the service {entry.service!r}; one box is one"
                )
            found[str(source)] = {"source": str(source), "exclude": tuple(entry.exclude)}
        return tuple(found.values())

    def _in_steps(self, config: Config) -> JsonObject:
        """Several pieces, and what holds for all of them."""
        steps: list[JsonObject] = []
        for step in config.steps:
            if not _STEP_NAME.fullmatch(step.name) or any(step.name == each["name"] for each in steps):
                self._problems.append(f"{self._at('steps')}: steps: {step.name!r} is no name of one folder, used once")
                continue
            least = {"reward": step.min_reward} if isinstance(step.min_reward, float | int) else step.min_reward or {}
            whole = {**self._piece(config, step), **self._system(f"{self._folder.name}/{step.name}")}
            steps.append({"name": step.name, "task": whole, "min_reward": least})
        limits = [step["task"]["limits"] for step in steps]
        return {
            "instruction": "\n\n".join(f"# {step['name']}\n\n{step['task']['instruction']}" for step in steps),
            "steps": tuple(steps),
            "step_reward": config.multi_step_reward_strategy or "mean",
            "limits": Limits(
                agent_timeout_s=sum(each.agent_timeout_s for each in limits) or 1,
                verify_timeout_s=sum(each.verify_timeout_s for each in limits) or 1,
            ),
        }

    def _refuse(self, place: Path, config: Config) -> None:
        environment, verifier = config.environment, config.verifier
        version = config.schema_version or config.version
        known = version is None or re.fullmatch(r"1(\.[0-4])?", str(version))
        wrong = {
            f"schema_version {version!r} is not known here; 1.0 to 1.4 are": not known,
        }
        verifiers = {"verifier": verifier, **{f"steps.{step.name}.verifier": step.verifier for step in config.steps}}
        for name, table in verifiers.items():
            wrong[f"{name}.environment goes with environment_mode = separate, which is not said"] = (
                table.environment is not None and not table.separate
            )
            for hook in table.collect:
                wrong[f"{name}.collect: of the service {hook.service!r}; one box is one"] = hook.service != "main"
        boxes = {f"{name}.environment": table.environment for name, table in verifiers.items()}
        for name, box in {"environment": environment, **boxes}.items():
            wrong |= _beyond_a_box(name, box) if box else {}
        self._problems += [f"{self._at(what)}: {what}" for what, so in wrong.items() if so]
        if environment.network_mode in (None, "public") and environment.allow_internet is not False:
            self._notices.append(f"{place}: the agent has no network here, where Harbor would give it one")
        if environment.network_mode == "allowlist" or config.agent.allowed_hosts:
            self._notices.append(
                f"{place}: the agent has no network here; allowed_hosts of [environment], [agent] are ignored"
            )
        if environment.skills_dir:
            self._notices.append(f"{place}: environment.skills_dir is ignored")
        if config.artifacts and not any(table.separate for table in verifiers.values()):
            self._notices.append(f"{place}: artifacts are not taken out; the verifier sees everything anyhow")

    def _instruction(self, below: str = "") -> str:
        path = self._needed(f"{below}instruction.md", "what the agent is asked")
        text = strip_canary(self._read(path)) if path else "-"
        if not text.strip():
            self._problems.append(f"{path}: says nothing")
            return "-"
        return text


def _is_separate(config: Config, step: StepTable | None) -> bool:
    said = step.verifier.separate if step else None
    return bool(config.verifier.separate if said is None else said)


def _solving(env: Mapping[str, str]) -> str:
    given = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
    return f"{given}{_RUN.format('/solution/solve.sh')}"


def _waiting(check: Healthcheck, where: str) -> str:
    return _HEALTHCHECK.format(
        start=math.ceil(check.start_period_sec),
        early=check.start_interval_sec,
        tries=max(1, check.retries),
        timeout=check.timeout_sec,
        command=shlex.quote(check.command),
        pause=check.interval_sec,
        where=where.replace("'", ""),
    )


def _beyond_a_box(name: str, environment: HarborEnvironment) -> dict[str, bool]:
    """What an environment may ask for that no box here has."""
    return {
        f"{name}.os = {environment.os!r}: boxes are linux": environment.os != "linux",
        f"{name}.gpus = {environment.gpus}: boxes have no GPU": bool(environment.gpus),
        f"{name}.tpu: boxes have no TPU": bool(environment.tpu),
    }


def _holds(folder: PurePosixPath, place: str) -> bool:
    return PurePosixPath(place).is_relative_to(folder)
