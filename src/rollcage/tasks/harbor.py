"""Reads a task folder in Harbor's format, schema 1.0 to 1.4, exactly as it lies there; what cannot run here is refused
by name. The older task.yaml of Terminal-Bench 1 is read, too."""

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
from rollcage.tasks.files import TaskFile
from rollcage.tasks.harbor_config import (
    ArtifactTable,
    Config,
    HarborEnvironment,
    Healthcheck,
    OldConfig,
    RollcageTable,
    StepTable,
    Verifier,
    unknown_in,
)
from rollcage.tasks.harbor_files import Dockerfile, complaints, dockerfile_of, folder_text, line_of, megabytes, yaml_of
from rollcage.tasks.harbor_images import plan_of, template_of, warm_steps
from rollcage.tasks.trees import tree_of
from rollcage.tasks.warm import FETCHES
from rollcage.types import SYSTEM_OWN, JsonObject, Limits, SandboxSpec, Task

CONFIG, OLD_CONFIG = "task.toml", "task.yaml"
DISK_MB = 2048
"""What may be written in the box, unless the task says."""
_WORKDIR = "/app"
_CANARY = re.compile(r"\s*(<!--.*\bcanary\b.*-->|#.*\bcanary\b.*)\s*", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_RUN = "chmod +x {0} && {0}"
_ROOT = (None, "", "root", 0, "0")
_HERE = ("localhost", "127.0.0.1", "main")
_STEP_NAME = re.compile(r"(?!\.{1,2}$)[^/\x00-\x1f]{1,200}")
_VERIFY_S = 600.0
_ARTIFACTS = "/logs/artifacts"
"""What every verifier with a box of its own gets of the agent's."""
_JUDGES_OWN = (*SYSTEM_OWN, "/tests", "/logs/verifier")
_OLD_VERIFY = """bash /tests/run-tests.sh 2>&1 | tee /logs/verifier/run-tests.txt
code=${PIPESTATUS[0]}; ! grep -qE '^(FAILED|ERROR) ' /logs/verifier/run-tests.txt && exit $code"""
"""By what pytest says (`-rA`): a script may do something else after it."""
_HEALTHCHECK = """failed=0; while true; do
  timeout {timeout} bash -c {command} && exit 0
  if [ $SECONDS -lt {start} ]; then sleep {early}; continue; fi
  failed=$((failed + 1)); [ $failed -lt {tries} ] || break; sleep {pause}
done; echo 'the healthcheck of {where} never passed' >&2; exit 1"""


def is_folder_task(folder: Path) -> bool:
    """Whether a folder is a task in this format."""
    return folder.is_dir() and any((folder / name).is_file() for name in (CONFIG, OLD_CONFIG))


def load_folder(folder: Path) -> TaskFile:
    """The task in a folder; TaskError with one line per problem, each with its file, where it cannot be used here."""
    if (folder / CONFIG).is_file():
        return _FolderReader(folder).read()
    if (folder / OLD_CONFIG).is_file():
        return _FolderReader(folder).read_old()
    raise TaskError(f"{folder}: there is neither {CONFIG} nor {OLD_CONFIG} in this folder")


def strip_canary(text: str) -> str:
    """An instruction without the lines at its start that mark a public task: they are not for the agent."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _CANARY.fullmatch(lines[0])):
        lines.pop(0)
    return "\n".join(lines)


class _FolderReader:
    """Turns a folder into a task, collecting what is wrong on the way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: list[str] = []
        self._notices: list[str] = []
        self._workdir = _WORKDIR
        self._image_user = ""
        self._text = ""
        self._ours = RollcageTable()

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
        self._work_in(context, environment.workdir, environment.docker_image)
        checks = (_waiting(environment.healthcheck, "[environment]"),) if environment.healthcheck else ()
        task = self._in_steps(config) if config.steps else self._piece(config)
        task["setup"] = (*checks, *task.get("setup", ()))
        sandbox = SandboxSpec(
            template=self._template(context, environment.docker_image),
            disk_mb=environment.storage_mb or megabytes(environment.storage) or DISK_MB,
            memory_mb=max(64, environment.memory_mb or megabytes(environment.memory) or SandboxSpec().memory_mb),
            cpus=environment.cpus,
            env=self._values("environment.env", environment.env),
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
                {"command": each.command, "timeout_s": each.timeout_sec, "user": _user(each.user)} for each in collect
            ),
            "agent_user": _user((step.agent.user if step else None) or config.agent.user or self._image_user),
            "verify_user": _user((step.verifier.user if step else None) or config.verifier.user)
            or self._judges_user(config, step, below),
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
        return _user(own.user) if own else self._image_user

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
        template, has_tests, workdir = (
            self._template(self._folder / "environment", config.environment.docker_image),
            0,
            "",
        )
        for table, context in tables:
            image = table.environment.docker_image if table.environment else None
            self._compose(context / "docker-compose.yaml")
            if image or (context / "Dockerfile").is_file():
                template = template_of(image) if image else self._image(context)
                own = self._dockerfile(context)
                has_tests, workdir = 1, own.workdir if own else _WORKDIR
                break
        place = resources.workdir or workdir or self._workdir
        if self._ours.isolate and (PurePosixPath(place).is_relative_to("/tests") or place == "/"):
            what = (
                f"isolate = true: the verifier works in {place}, where its tests are; give it a workdir apart from them"
            )
            self._problems.append(f"{self._at('metadata.rollcage.isolate')}: {what}")
        return {
            "template": template,
            "has_tests": bool(has_tests),
            "workdir": place,
            "env": self._values("verifier.environment.env", resources.env),
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

    def read_old(self) -> TaskFile:
        place = self._folder / OLD_CONFIG
        try:
            config = OldConfig.model_validate(yaml_of(place, self._read(place)))
        except ValidationError as error:
            raise TaskError(complaints(place, error)) from error
        if config.parser_name != "pytest":
            self._problems.append(f"{place}: parser_name {config.parser_name!r} is not known here; only pytest is")
        if unknown := list(unknown_in(config)):
            self._notices.append(f"{place}: unknown and ignored: {', '.join(unknown)}")
        if config.run_tests_in_same_shell:
            self._notices.append(f"{place}: run_tests_in_same_shell is ignored; the verifier has a shell of its own")
        self._compose(self._folder / "docker-compose.yaml")
        script = self._needed("run-tests.sh", "the verifier")
        self._note_network("run-tests.sh", "the verifier reaches only what --verify-hosts allows", context=self._folder)
        solved = (self._folder / "solution.sh").is_file()
        if not solved and (self._folder / "solution.yaml").is_file():
            self._notices.append(
                f"{self._folder / 'solution.yaml'}: keys that are typed are no script; there is no oracle"
            )
        task: JsonObject = {
            "instruction": strip_canary(config.instruction),
            "tests_tree": self._tree("tests") if (self._folder / "tests").is_dir() else None,
            "tests": {"run-tests.sh": self._read(script)} if script else {},
            "verify": (_OLD_VERIFY,),
            "verify_env": {"TEST_DIR": "/tests", "T_BENCH_TEST_DIR": "/tests"},
            "reward_from": "commands",
            "solution_tree": self._tree("solution.sh") if solved else None,
            "solution_script": "bash /solution/solution.sh" if solved else "",
            "limits": Limits(
                agent_timeout_s=config.max_agent_timeout_sec, verify_timeout_s=config.max_test_timeout_sec
            ),
        }
        sandbox = SandboxSpec(template=self._template(self._folder, None), disk_mb=DISK_MB)
        self._work_in(self._folder)
        task |= {"agent_user": self._image_user, "verify_user": self._image_user}
        return self._made(self._folder.resolve().name, task, sandbox)

    def _work_in(self, context: Path, workdir: str | None = None, docker_image: str | None = None) -> None:
        """Where commands are and who they are, by the folder of a Dockerfile and what goes before it."""
        said = self._dockerfile(context)
        if said:
            self._workdir, self._image_user = workdir or said.workdir, _user(said.user)
            if said.notice and not workdir:
                self._notices.append(f"{context / 'Dockerfile'}: {said.notice}; the workdir is {self._workdir}")
        else:
            self._workdir = workdir or _WORKDIR
            if docker_image and not workdir:
                what = f"names no workdir, and its image is not asked for one; it is {_WORKDIR}"
                self._notices.append(f"{self._at('environment.docker_image')}: {what}")

    def _system(self, name: str) -> JsonObject:
        """Harbor's verifier sees everything as the agent left it, unless the task says to us that it need not."""
        isolate, keep = self._ours.isolate, self._ours.keep
        kept = tuple(keep) if keep is not None else () if isolate else ("/",)
        paths = {"paths": "system", "workdir": self._workdir, "keep": kept, "restore": (), "seal_tests": False}
        return {"id": name[:200], **paths, "isolate": isolate}

    def _made(self, name: str, task: JsonObject, sandbox: SandboxSpec) -> TaskFile:
        if self._problems:
            raise TaskError("\n".join(dict.fromkeys(self._problems)))
        try:
            made = Task.model_validate({**self._system(name), **task})
        except ValidationError as error:
            place = self._folder / (CONFIG if self._text else "")
            raise TaskError(complaints(place, error, self._text, under="environment")) from error
        return TaskFile(path=self._folder, task=made, sandbox=sandbox, notices=tuple(self._notices))

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
        self._compose(self._folder / "environment" / "docker-compose.yaml")
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

    def _note_network(self, name: str, why: str, *, context: Path | None = None) -> None:
        """Say which line of a script fetches something, before it fails in a box that cannot.

        `context`: of the image in whose build what can be installed beforehand is.
        """
        path = self._folder / name
        steps = warm_steps(self._folder, context) if context and (context / "Dockerfile").is_file() else ()
        warmed = {step.line for step in steps if step.path == path and step.whole}
        lines = path.read_text(errors="replace").splitlines() if path.is_file() and not path.is_symlink() else []
        for number, line in enumerate(lines, 1):
            if number in warmed or line.lstrip().startswith("#"):
                continue
            if found := FETCHES.search(line):
                self._notices.append(f"{path}:{number}: `{found[1]}` may want a network: {why}")
                return

    def _at(self, what: str) -> str:
        """The file, and the line of the field that a complaint begins with."""
        found = re.match(r"[\w.]+", what)
        line = line_of(self._text, found[0].split(".")) if found else 0
        return f"{self._folder / CONFIG}{f':{line}' if line else ''}"

    def _compose(self, path: Path) -> None:
        if not path.exists():
            return
        services = yaml_of(path, self._read(path)).get("services")
        names = list(services) if isinstance(services, dict) else []
        if len(names) != 1:
            self._problems.append(f"{path}: has the services {', '.join(map(str, names)) or 'none'}; one box is one")

    def _instruction(self, below: str = "") -> str:
        path = self._needed(f"{below}instruction.md", "what the agent is asked")
        text = strip_canary(self._read(path)) if path else "-"
        if not text.strip():
            self._problems.append(f"{path}: says nothing")
            return "-"
        return text

    def _read(self, path: Path) -> str:
        return folder_text(path, self._folder)

    def _needed(self, name: str, what: str) -> Path | None:
        path = self._folder / name
        if path.is_file():
            return path
        self._problems.append(f"{path}: is missing: {what}")
        return None

    def _tree(self, name: str) -> object:
        place = self._folder / name
        try:
            if place.is_symlink() and place.resolve().is_relative_to(self._folder.resolve()):
                place = place.resolve()  # another folder of the task
            return tree_of(place)
        except TaskError as error:
            self._problems.append(str(error))
            return None

    def _values(self, where: str, given: Mapping[str, str]) -> dict[str, str]:
        """With `${NAME:-default}` filled in by the default: nothing of this machine's environment goes to a box."""

        def filled(found: re.Match[str]) -> str:
            if found[2] is None:
                why = f"{found[0]} is taken from the machine's environment, which no box gets"
                self._problems.append(f"{self._at(where)}: {where}: {why}")
            return found[2] or ""

        return {name: _VARIABLE.sub(filled, value) for name, value in given.items()}

    def _template(self, context: Path, docker_image: str | None) -> str:
        if (context / "Dockerfile").is_file():
            return self._image(context)
        return template_of(docker_image) if docker_image else ""

    def _image(self, context: Path) -> str:
        try:
            return plan_of(self._folder, context).name
        except TaskError as error:
            self._problems.append(str(error))
            return ""

    def _dockerfile(self, context: Path) -> Dockerfile | None:
        path = context / "Dockerfile"
        return dockerfile_of(self._read(path)) if path.is_file() else None


def _is_separate(config: Config, step: StepTable | None) -> bool:
    said = step.verifier.separate if step else None
    return bool(config.verifier.separate if said is None else said)


def _user(given: str | int | None) -> str:
    return "" if given in _ROOT else str(given)


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
