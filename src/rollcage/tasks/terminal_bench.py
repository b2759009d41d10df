"""Reads a task folder of Terminal-Bench 1: task.yaml, run-tests.sh, solution.sh."""

from __future__ import annotations

from pydantic import ValidationError

from rollcage.errors import TaskError
from rollcage.tasks.files import TaskFile
from rollcage.tasks.harbor_config import OldConfig, unknown_in
from rollcage.tasks.harbor_files import complaints, strip_canary, yaml_of
from rollcage.tasks.harbor_folder import DISK_MB, FolderReader
from rollcage.types import JsonObject, Limits, SandboxSpec

CONFIG = "task.yaml"
_VERIFY = """bash /tests/run-tests.sh 2>&1 | tee /logs/verifier/run-tests.txt
code=${PIPESTATUS[0]}; ! grep -qE '^(FAILED|ERROR) ' /logs/verifier/run-tests.txt && exit $code"""
"""By what pytest says (`-rA`): a script may do something else after it."""


class TerminalBenchReader(FolderReader):
    """Reads task.yaml and what lies beside it."""

    def read(self) -> TaskFile:
        place = self._folder / CONFIG
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
        service = self._compose(self._folder / "docker-compose.yaml")
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
            "verify": (_VERIFY,),
            "verify_env": {"TEST_DIR": "/tests", "T_BENCH_TEST_DIR": "/tests"},
            "reward_from": "commands",
            "solution_tree": self._tree("solution.sh") if solved else None,
            "solution_script": "bash /solution/solution.sh" if solved else "",
            "limits": Limits(
                agent_timeout_s=config.max_agent_timeout_sec, verify_timeout_s=config.max_test_timeout_sec
            ),
        }
        sandbox = SandboxSpec(template=self._template(self._folder, service.image), disk_mb=DISK_MB, env=service.env)
        self._work_in(self._folder, docker_image=service.image)
        task |= {"agent_user": self._image_user, "verify_user": self._image_user}
        return self._made(self._folder.resolve().name, task, sandbox)
