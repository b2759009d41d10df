"""Which paths of the workdir are put back as setup left them, and how, where a box cannot be rewound."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import NamedTuple

from rollcage.errors import SandboxError
from rollcage.sandboxes.base import PATH, SHELL, Exit, Sandbox, run
from rollcage.sandboxes.home_archive import HomeArchive, archived_home
from rollcage.types import Task, resolve_box_path

GIT = ("config", "config.worktree", "commondir", "hooks", "info", "objects/info")
"""What in a repository makes git run programs: filters, external diffs, hooks, and where it takes all that from."""

MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
"""Make reads the first that is there: whoever has one put back wants none of the agent's before it."""

# For each path: 1 where it is there, 0 where only the folder above it is, - where not even that is.
_LOOK = """
for path; do
  above=${path%/*}
  if [ "$(readlink -f -- "$above")" != "$above" ] || [ ! -d "$above" ]; then echo -
  elif [ -e "$path" ] || [ -L "$path" ]; then echo 1
  else echo 0; fi
done
"""

# Whatever the agent made of a folder above a path (a link, a file) becomes a folder; the path itself is removed.
_CLEAR = """
for path; do
  here=$HOME rest=${path#"$HOME"/}
  while [ "${rest#*/}" != "$rest" ]; do
    here=$here/${rest%%/*} rest=${rest#*/}
    if [ -L "$here" ] || [ ! -d "$here" ]; then rm -rf -- "$here" && mkdir -- "$here" || exit 1; fi
    chmod u+rwx -- "$here" || exit 1
  done
  [ -L "$path" ] || [ ! -d "$path" ] || chmod -R u+rwx -- "$path"
  rm -rf -- "$path" || exit 1
done
"""


def restored_paths(task: Task, tests: Sequence[str] = ()) -> tuple[str, ...]:
    """What is put back: what the task names, else the parts of a `.git` that make git run programs, and the tests.

    `tests`: files of setup's that are tests.
    """
    if task.restore is None:
        return (*(f"{task.workdir}/.git/{name}" for name in GIT), *tests)
    named = [PurePosixPath(resolve_box_path(path, task.workdir, top=task.top)) for path in task.restore]
    before = (str(path.parent / name) for path in named if path.name in MAKEFILES for name in MAKEFILES)
    return tuple(dict.fromkeys((*map(str, named), *before)))


class Saved(NamedTuple):
    """The paths to be put back, as setup left them."""

    paths: Sequence[str] = ()
    """All of them, those included that setup had not made."""
    archive: HomeArchive | None = None

    async def put_back(self, box: Sandbox) -> None:
        """Put them into a box that has the workdir as the agent left it."""
        if not self.paths:
            return
        cleared = await _shell(box, _CLEAR, self.paths)
        if cleared.code:
            raise SandboxError(f"cannot put back what setup made: {cleared.stderr.text.strip() or cleared.code}")
        if self.archive is not None:
            await self.archive.unpack(box)


@asynccontextmanager
async def saved_for_later(box: Sandbox, paths: Sequence[str], limit: int) -> AsyncIterator[Saved]:
    """Pack what is to be put back; `limit`: in bytes."""
    if not paths:
        yield Saved()
        return
    states = (await _shell(box, _LOOK, paths)).stdout.text.split()
    if len(states) != len(paths):
        raise SandboxError("cannot look at what setup made")
    found = [path for path, state in zip(paths, states, strict=True) if state == "1"]
    known = [path for path, state in zip(paths, states, strict=True) if state != "-"]
    if not found:
        yield Saved(known)
        return
    async with archived_home(box, only=found, limit=limit) as archive:
        yield Saved(known, archive)


async def _shell(box: Sandbox, script: str, paths: Sequence[str]) -> Exit:
    argv = [*SHELL, script, "restore", *paths]
    return await run(box, argv, env={"PATH": PATH}, inherit_image_env=False, cwd="/")
