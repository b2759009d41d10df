"""Notices in the agent's work what a plain verifier would be misled by: it asks the box, and changes no reward."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath

from rollcage.events import Event, Suspicion
from rollcage.rollout.patch import HEAD
from rollcage.sandboxes.base import PATH, Sandbox, run
from rollcage.types import Task

Log = Callable[[Event], Awaitable[object]]

_SOURCED = re.compile(r"(?:^|[;&|({\s])(?:\.|source)\s+[\"']?([^\s;&|)\"']+)")
_ASKS_GIT = re.compile(r"\bgit\b[^\n;|&]*\b(status|diff)\b")
_BINARY = re.compile(r"^Binary files .* and b/(.+) differ$", re.MULTILINE)
_MOST_BINARIES = 50

_COPIES = """
for path; do
  [ -f "$path" ] && [ ! -L "$path" ] && size=$(stat -c %s -- "$path") || continue
  same=$(find -L /bin /usr/bin /usr/local/bin -type f -size "${size}c" -exec cmp -s -- "$path" {} \\; -print -quit)
  [ -z "$same" ] || printf '%s\\0' "$path"
done
"""
_MOVED = f"""
[ -e .git ] && before=$(cat {HEAD}) || exit 1
[ "$(git -c core.fsmonitor=false rev-parse -q --verify HEAD)" != "$before" ]
"""


def sourced_by(task: Task) -> frozenset[str]:
    """Names of files that the verifier reads into its own shell."""
    return frozenset(PurePosixPath(path).name for path in _SOURCED.findall(_verifier(task)))


async def notice_misleading(task: Task, box: Sandbox, patch: str, log: Log) -> None:
    """Programs that are copies of the system's, and commits where the verifier asks git what was changed."""
    if binaries := _BINARY.findall(patch)[:_MOST_BINARIES]:
        told = await _shell(box, _COPIES, task.workdir, *binaries)
        if copies := tuple(told[1].split("\0")[:-1]):
            await log(Suspicion(code="system_program", what="a copy of a program of the system's", paths=copies))
    if _ASKS_GIT.search(_verifier(task)) and (await _shell(box, _MOVED, task.workdir))[0] == 0:
        what = "there are new commits; a verifier that asks git what was changed is not told what they hold"
        await log(Suspicion(code="moved_head", what=what, paths=(".git",)))


def _verifier(task: Task) -> str:
    return "\n".join((*task.verify, task.test_script, *task.tests.values()))


async def _shell(box: Sandbox, script: str, workdir: str, *words: str) -> tuple[int, str]:
    argv = ["bash", "--noprofile", "--norc", "-c", script, "notice", *words]
    ended = await run(box, argv, env={"PATH": PATH}, inherit_image_env=False, cwd=workdir, timeout_s=30.0)
    return ended.code, ended.stdout.text
