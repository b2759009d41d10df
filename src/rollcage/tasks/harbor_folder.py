"""A task's folder while it is read: what its files and images are, and what is said of them, wrong or worth knowing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from rollcage.errors import TaskError
from rollcage.tasks.files import TaskFile
from rollcage.tasks.harbor_config import RollcageTable
from rollcage.tasks.harbor_files import (
    ComposeService,
    Dockerfile,
    complaints,
    dockerfile_of,
    folder_text,
    line_of,
    services_of,
)
from rollcage.tasks.harbor_images import plan_of, template_of, warm_steps
from rollcage.tasks.trees import tree_of
from rollcage.tasks.warm import FETCHES
from rollcage.types import JsonObject, SandboxSpec, Task

CONFIG = "task.toml"
DISK_MB = 2048
"""What may be written in the box, unless the task says."""
WORKDIR = "/app"
"""Where commands are where nothing names a folder."""
_ROOT = (None, "", "root", 0, "0")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def user_of(*given: str | int | None) -> str:
    """The first that is said, as a task has it: a name or a number; empty is root."""
    said = next((each for each in given if each is not None), None)
    return "" if said in _ROOT else str(said)


class FolderReader:
    """What readers of both formats share: they collect what is wrong, and say all of it at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: list[str] = []
        self._notices: list[str] = []
        self._workdir = WORKDIR
        self._image_name = self._image_user = ""
        self._env: dict[str, str] = {}
        self._text = ""
        """Of task.toml."""
        self._ours = RollcageTable()

    def _work_in(self, context: Path, workdir: str | None = None, docker_image: str | None = None) -> None:
        """Where commands are and who they are, by the folder of a Dockerfile and what goes before it."""
        said = self._dockerfile(context)
        if said:
            self._workdir, self._image_user = workdir or said.workdir, user_of(said.user)
            if said.notice and not workdir:
                self._notices.append(f"{context / 'Dockerfile'}: {said.notice}; the workdir is {self._workdir}")
        else:
            self._workdir = workdir or WORKDIR
            if docker_image and not workdir:
                what = f"names no workdir, and its image is not asked for one; it is {WORKDIR}"
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

    def _compose(self, path: Path) -> ComposeService:
        """The one service of a compose file; more are a problem, and what of it nobody follows is told."""
        if not path.exists():
            return ComposeService()
        services = services_of(path, self._read(path))
        if len(services) != 1:
            self._problems.append(f"{path}: has the services {', '.join(services) or 'none'}; one box is one")
            return ComposeService()
        [(name, service)] = services.items()
        if service.ignored:
            self._notices.append(f"{path}: of {name}, ignored: {', '.join(service.ignored)}")
        return service._replace(env=self._values(f"{path.name}: environment", service.env, path))

    def _read(self, path: Path) -> str:
        return folder_text(path, self._folder)

    def _needed(self, name: str, what: str) -> Path | None:
        path = self._folder / name
        inside = path.resolve().is_relative_to(self._folder.resolve())
        if path.is_file() and inside:
            return path
        wrong = f"is missing: {what}" if inside else f"is a link that leads out of {self._folder}"
        self._problems.append(f"{path}: {wrong}")
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

    def _values(self, where: str, given: Mapping[str, str], place: Path | None = None) -> dict[str, str]:
        """With `${NAME:-default}` filled in by the default: nothing of this machine's environment goes to a box."""

        def filled(found: re.Match[str]) -> str:
            if found[2] is None:
                why = f"{found[0]} is taken from the machine's environment, which no box gets"
                self._problems.append(f"{place or self._at(where)}: {where}: {why}")
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
