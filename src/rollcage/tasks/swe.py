"""Turns SWE-style records into tasks: those of SWE-bench 5, and the older fields of SWE-Gym, SWE-rebench, SWE-smith and
R2E-Gym. The agent gets the repository as it was; the tests come after it, and their log is read outside the box."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from rollcage.errors import TaskError, UsageError
from rollcage.tasks.expected import expected_of
from rollcage.tasks.files import TaskFile
from rollcage.tasks.harbor_folder import DISK_MB
from rollcage.tasks.harbor_images import template_of
from rollcage.tasks.logs import END, EXIT_CODE, START
from rollcage.tasks.problems import problems_of
from rollcage.tasks.trees import tree_of
from rollcage.types import Check, FileTree, JsonObject, Limits, SandboxSpec, Task

MARKS = frozenset({"FAIL_TO_PASS", "eval_script", "expected_output_json"})
"""A record has one of these keys; a task of ours has none."""
VERIFY_S = 1800.0
"""How long tests may take, as in the `swebench` package."""
_PARSERS = {"django/django": "django", "sympy/sympy": "sympy", "mwaskom/seaborn": "seaborn"}
"""Of repositories whose older records name none; pytest_v2 reads the others."""
_NO_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_OF_PYTEST = re.compile(r"[\w./-]+\.py::\w")
_TOUCHED = re.compile(r"^(?:diff --git a/.* b/|--- a/|\+\+\+ b/)(.+)$", re.MULTILINE)
_MADE = re.compile(r"^--- a/(.+)$", re.MULTILINE)

_GIT = "export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'"
_START = r"""
set -eu
cd -- {workdir}
{git}
stop() {{ echo "$1" >&2; exit 1; }}
dir=$(git rev-parse --absolute-git-dir) || stop {workdir}' is no git repository'
branch=$(git symbolic-ref -q HEAD || true)
"""
_AT_BASE = r"""
base=$(git rev-parse --verify --quiet {base}^{{commit}}) || stop {base}' is no commit of the repository in '{workdir}
# Images may have one commit of their own on the base; it stays where it changes nothing that the patches do.
if [ "$(git rev-parse HEAD)" != "$base" ]; then
  if [ "$(git rev-parse --verify --quiet HEAD^)" != "$base" ] || ! git diff --quiet "$base" HEAD -- {files}; then
    git checkout -q -f --detach "$base"
  fi
fi
"""
_WITH_BUG = r"""
bug=$(mktemp)
cat > "$bug" <<'{end}'
{patch}
{end}
git update-index -q --refresh || true
git apply --index --whitespace=nowarn "$bug" || git apply --check --reverse "$bug" || stop 'the bug cannot be put in'
rm -f "$bug"
# The commit before it is the solution: there is none.
tree=$(git write-tree)
start=$(git -c user.name=start -c user.email=start@localhost commit-tree -m start "$tree")
git update-ref --no-deref HEAD "$start"
"""
_FORGET = r"""
keep=$(git rev-parse HEAD)
git update-ref --no-deref HEAD "$keep"
past=$(mktemp)
git for-each-ref --merged="$keep" --format='%(refname)' refs/tags > "$past"
{{ git for-each-ref --format='%(refname)' | grep -vxFf "$past" || true; }} |
  while read -r ref; do git update-ref --no-deref -d "$ref"; done
rm -f "$past"
[ -z "$branch" ] || {{ git update-ref "$branch" "$keep"; git symbolic-ref HEAD "$branch"; }}
for remote in $(git remote); do git remote remove "$remote"; done
rm -rf -- "$dir"/logs "$dir"/worktrees "$dir"/*_HEAD "$dir"/objects/info/commit-graph*
rm -f -- "$dir"/objects/pack/*.keep "$dir"/objects/pack/*.promisor
git repack -q -a -d
rm -f -- "$dir"/objects/info/alternates
git prune --expire=now
all=$(git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c '^commit$')
[ "$all" = "$(git rev-list --count HEAD --tags)" ] || stop 'commits after the base are still in the repository'
"""


def _listed(value: object) -> object:
    """Lists come as JSON in a string, too."""
    return json.loads(value) if isinstance(value, str) else value or ()


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class InstallConfig(BaseModel):
    """`install_config` of SWE-rebench."""

    model_config = ConfigDict(frozen=True)

    test_cmd: str | list[str] = ""
    log_parser: str = ""


class SweRecord(BaseModel):
    """What we know of a record; the rest of it is ignored."""

    model_config = ConfigDict(frozen=True)

    instance_id: str = ""
    repo: str = ""
    image: str = ""
    image_name: str = ""
    """SWE-smith."""
    docker_image: str = ""
    """SWE-rebench and R2E-Gym."""
    repo_dir: str = ""
    """Our own: a checkout beside the file, where there is no image."""
    workdir: str = "/testbed"
    base_commit: str = ""
    problem_statement: str = ""
    patch: str = ""
    """The solution; in SWE-smith, the bug."""
    test_patch: str = ""
    eval_script: str = ""
    eval_type: str = "pass_and_fail"
    log_parser: str = ""
    test_cmd: str | list[str] = ""
    install_config: InstallConfig = InstallConfig()
    FAIL_TO_PASS: Names = ()
    PASS_TO_PASS: Names = ()
    expected_output_json: Annotated[dict[str, str], BeforeValidator(lambda value: _listed(value) or {})] = {}
    """R2E-Gym: how each test ends once the task is solved."""

    @property
    def box_image(self) -> str:
        """The image, by whichever name."""
        return self.image or self.docker_image or self.image_name

    @property
    def bug(self) -> str:
        """The patch that makes the task, where it is one that breaks what worked."""
        return "" if self.base_commit or self.test_patch or self.expected_output_json else self.patch

    @property
    def parser(self) -> str:
        """The name of the log parser."""
        named = self.log_parser or self.install_config.log_parser
        return named or ("r2e" if self.expected_output_json else _PARSERS.get(self.repo, "pytest_v2"))


def is_record(data: Mapping[str, object]) -> bool:
    """Whether a line of a JSON lines file is such a record."""
    return not MARKS.isdisjoint(data)


def task_of_record(data: JsonObject, path: Path, where: str, *, name: str = "") -> TaskFile:
    """The task of a record in the file at `path`. TaskError, each line beginning with `where`, where it makes none."""
    # Datasets write null for what a record does not have.
    given = {key: value for key, value in data.items() if value is not None}
    try:
        record = SweRecord.model_validate(given)
        problems = _problems(record)
        if problems:
            raise UsageError("\n".join(problems))
        task = _task(record, path.parent, name)
        expected_of(task)
    except ValidationError as error:
        raise TaskError("\n".join(f"{where}: {problem}" for problem in problems_of(error))) from error
    except UsageError as error:
        raise TaskError("\n".join(f"{where}: {problem}" for problem in str(error).splitlines())) from error
    sandbox = SandboxSpec(template=template_of(record.box_image), disk_mb=DISK_MB)
    return TaskFile(path=path, task=task, sandbox=sandbox)


def _problems(record: SweRecord) -> list[str]:
    script = record.eval_script
    wrong = {
        "problem_statement: is missing: what the agent is asked": not record.problem_statement.strip(),
        "image: is missing (or image_name, docker_image; or repo_dir, a checkout beside the file)": not (
            record.box_image or record.repo_dir
        ),
        "FAIL_TO_PASS: is empty: no test tells whether it is solved": not (
            record.FAIL_TO_PASS or record.expected_output_json
        ),
        "eval_script: is missing, and so is test_cmd, from which one could be made": not (script or _command(record)),
        f"eval_script: does not say {START!r} and {END!r}, between which the tests run": bool(script)
        and (START not in script or END not in script),
        f"eval_type: {record.eval_type!r} is not graded here, only 'pass_and_fail'": record.eval_type
        != "pass_and_fail",
        "base_commit: is missing, and the record has a test_patch": bool(record.test_patch) and not record.base_commit,
        f"base_commit: {record.base_commit!r} is no name of a commit": bool(record.base_commit)
        and not re.fullmatch(r"[0-9a-zA-Z][\w./-]*", record.base_commit),
    }
    return [what for what, so in wrong.items() if so]


def _task(record: SweRecord, folder: Path, name: str) -> Task:
    failing = record.FAIL_TO_PASS or tuple(
        test for test, status in record.expected_output_json.items() if status == "PASSED"
    )
    check = Check(
        kind="log",
        command=with_exit_code(record.eval_script or _script(record)),
        parser=record.parser,
        expect=tuple(dict.fromkeys(failing)),
        maintain=tuple(test for test in dict.fromkeys(record.PASS_TO_PASS) if test not in failing),
        together=True,
        timeout_s=VERIFY_S,
    )
    trees: dict[str, FileTree] = {}
    if record.repo_dir:
        place = (folder / record.repo_dir).resolve()
        if not place.is_relative_to(folder.resolve()) or not place.is_dir():
            raise UsageError(f"repo_dir: {record.repo_dir!r} is no folder beside the file")
        trees[record.workdir] = tree_of(place)
    undo = f"{_GIT}; git apply --reverse --whitespace=nowarn {_heredoc(record.bug)}" if record.bug else ""
    return Task(
        id=(record.instance_id or name)[:200],
        instruction=record.problem_statement,
        paths="system",
        workdir=record.workdir,
        trees=trees,
        setup=(_setup(record),),
        checks=(check,),
        solution_patch="" if record.bug or not record.patch else record.patch.removesuffix("\n") + "\n",
        solution_script=undo,
        limits=Limits(setup_timeout_s=900, verify_timeout_s=VERIFY_S),
    )


def _setup(record: SweRecord) -> str:
    """The repository as it was: at its base, and with nothing in it that came later."""
    parts = [_START]
    if record.base_commit:
        parts.append(_AT_BASE)
    if record.bug:
        parts.append(_WITH_BUG)
    touched = dict.fromkeys(_TOUCHED.findall(record.patch + "\n" + record.test_patch))
    values = {
        "workdir": shlex.quote(record.workdir),
        "git": _GIT,
        "base": shlex.quote(record.base_commit),
        "files": " ".join(map(shlex.quote, touched)) or ".",
        "end": _end_of(record.bug),
        "patch": record.bug.removesuffix("\n"),
    }
    return "".join(part.format(**values) for part in (*parts, _FORGET))


def _command(record: SweRecord) -> str:
    given = record.test_cmd or record.install_config.test_cmd
    command = given if isinstance(given, str) else "\n".join(given)
    if command or record.expected_output_json:
        return command or "bash /run_tests.sh"
    # Records of SWE-Gym and SWE-smith name none; the names of their tests are pytest's.
    tests = (*record.FAIL_TO_PASS, *record.PASS_TO_PASS)
    if not tests or not all(_OF_PYTEST.match(test) for test in tests):
        return ""
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    return " ".join(["pytest -rA", *(() if record.test_patch else map(shlex.quote, files))])


def _script(record: SweRecord) -> str:
    """Out of a test command: the test patch is put in, its files are tested."""
    lines = [
        "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi",
        f"cd {shlex.quote(record.workdir)}",
    ]
    command = _command(record)
    if record.test_patch:
        before = [name for name in dict.fromkeys(_MADE.findall(record.test_patch)) if name != "dev/null"]
        if before:
            lines.append(f"git checkout {shlex.quote(record.base_commit)} -- {' '.join(map(shlex.quote, before))}")
        lines.append(f"git apply -v {_heredoc(record.test_patch)}")
        after = dict.fromkeys(re.findall(r"^\+\+\+ b/(.+)$", record.test_patch, re.MULTILINE))
        tested = [shlex.quote(name) for name in after if not name.endswith(_NO_TESTS)]
        command = " ".join([command, *tested])
    return "\n".join([*lines, f": '{START}'", command, f": '{END}'", ""])


def with_exit_code(script: str) -> str:
    """A script that says how its test command ended, after the end of the tests' output."""
    lines = [line for line in script.strip().split("\n") if line not in ("#!/bin/bash", "set -uxo pipefail")]
    at = next(number for number, line in enumerate(lines) if END in line)
    said = f'echo "{EXIT_CODE}: $ROLLCAGE_TEST_EXIT_CODE"'
    lines[at : at + 1] = ["ROLLCAGE_TEST_EXIT_CODE=$?", lines[at], said]
    return "\n".join(["set -uxo pipefail", *lines, ""])


def _end_of(text: str) -> str:
    return f"EOF_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _heredoc(text: str) -> str:
    """The arguments of a command that reads a text: standard input, and what is on it."""
    end = _end_of(text)
    return f"- <<'{end}'\n{text.removesuffix(chr(10))}\n{end}"
