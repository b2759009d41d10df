"""A sandbox backend as users write one for the published protocol: folders for boxes, commands as plain processes.

It knows nothing of rollcage. What it calls /home/user is a folder of its own, put in wherever a path or a command says
so, and its network is the machine's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from opencode_env.sandbox.base import ExecResult

NAMED = "/home/user"


class FolderJob:
    """A process in the background."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from error

    def kill(self) -> None:
        """The process's own group and no more, as users write it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class FolderHandle:
    """One folder that is taken for a box."""

    def __init__(self, folder: Path, envs: dict[str, str]) -> None:
        self.folder, self._envs = folder, envs
        self.jobs: list[FolderJob] = []
        self.broken: Callable[[str], ExecResult | None] = lambda cmd: None
        """For tests: an answer to a command that is given instead of running it; it may raise."""

    @property
    def sandbox_id(self) -> str:
        return self.folder.name

    def _here(self, text: str) -> str:
        return text.replace(NAMED, str(self.folder))

    def _env(self, envs: dict[str, str] | None) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
        return {**plain, "HOME": str(self.folder), **self._envs, **(envs or {})}

    def exec(
        self, cmd: str, *, envs: dict[str, str] | None = None, cwd: str | None = None, timeout: float | None = 60
    ) -> ExecResult:
        if (answer := self.broken(cmd)) is not None:
            return answer
        if not self.folder.exists():
            raise RuntimeError("there is no such box any more")
        try:
            done = subprocess.run(
                ["bash", "-c", self._here(cmd)],
                cwd=self._here(cwd or NAMED),
                env=self._env(envs),
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return ExecResult(124, "", f"no end after {timeout} s")
        return ExecResult(done.returncode, done.stdout, done.stderr)

    def start_bg(self, cmd: str, *, envs: dict[str, str] | None = None, cwd: str | None = None) -> FolderJob:
        process = subprocess.Popen(
            ["bash", "-c", self._here(cmd)],
            cwd=self._here(cwd or NAMED),
            env=self._env(envs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.jobs.append(FolderJob(process))
        return self.jobs[-1]

    def write_text(self, path: str, content: str) -> None:
        place = Path(self._here(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)

    def read_text(self, path: str) -> str:
        return Path(self._here(path)).read_text()

    def exists(self, path: str) -> bool:
        return Path(self._here(path)).exists()

    def kill(self) -> None:
        for job in self.jobs:
            job.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class FolderBackend:
    """Makes such boxes below one folder; what `template` holds is in each of them from the start."""

    def __init__(self, root: Path, template: Path | None = None) -> None:
        self._root, self._template = root, template
        self.orders: list[dict[str, object]] = []
        self.handles: list[FolderHandle] = []

    def create(
        self, *, timeout_s: int = 900, envs: dict[str, str] | None = None, metadata: dict[str, str] | None = None
    ) -> FolderHandle:
        self.orders.append({"timeout_s": timeout_s, "envs": envs, "metadata": metadata})
        folder = Path(tempfile.mkdtemp(prefix="box-", dir=self._root))
        if self._template is not None:
            shutil.copytree(self._template, folder, copy_function=os.symlink, dirs_exist_ok=True)
        self.handles.append(FolderHandle(folder, envs or {}))
        return self.handles[-1]
