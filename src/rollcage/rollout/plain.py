"""The work of a small plain folder that was empty before, looked at without a command: its files, patch and archive."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from rollcage.rollout.patch import MAX_PATCH_BYTES, Patch
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.contents import FolderEntry, ReadsFolders
from rollcage.sandboxes.files import Collected, collected_from, is_skipped
from rollcage.types import HOME, Task

_PLAIN_NAME = re.compile(r"[\w./@%+=:,~-]+", re.ASCII)
"""One that git writes as it is."""
_LOOKED_AT = 8000
"""Where a NUL is among so many bytes, git takes a file for binary."""


class PlainWork(NamedTuple):
    """What an agent left."""

    collected: Collected
    patch: Patch
    entries: Sequence[FolderEntry]
    """The workdir itself, and all in it."""


async def plain_work(task: Task, box: Sandbox) -> PlainWork | None:
    """The work in a workdir that was empty when the agent began, with the places of tests and rewards made; None where
    it takes commands to look at it."""
    places = (task.reward_dir, task.tests_dir)
    if not isinstance(box, ReadsFolders) or task.keep or task.paths == "system":
        return None
    if any(PurePosixPath(place).is_relative_to(task.workdir) for place in places):
        return None
    entries = await box.plain_contents(task.workdir, places)
    patch = None if entries is None else patch_of_added(entries)
    return None if entries is None or patch is None else PlainWork(collected_from(entries), patch, entries)


def patch_of_added(entries: Sequence[FolderEntry]) -> Patch | None:
    """What git would write of a folder that was empty before; None where that takes git to know."""
    parts: list[bytes] = []
    for entry in sorted(entries, key=lambda each: each.path.encode()):
        if entry.data is None or is_skipped(entry.path):
            continue
        if not _PLAIN_NAME.fullmatch(entry.path):
            return None
        parts.append(_added(entry.path, entry.data, executable=bool(entry.mode & 0o100)))
    patch = b"".join(parts)
    return None if len(patch) > MAX_PATCH_BYTES else Patch(patch.decode("utf-8", "replace"), truncated=False)


def _added(path: str, data: bytes, *, executable: bool) -> bytes:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    mode = "100755" if executable else "100644"
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\nindex 0000000..{blob[:7]}\n"
    if b"\0" in data[:_LOOKED_AT]:
        return f"{head}Binary files /dev/null and b/{path} differ\n".encode()
    if not data:
        return head.encode()
    lines = data.split(b"\n")
    ends_in_line = not lines[-1]
    lines = lines[:-1] if ends_in_line else lines
    count = "1" if len(lines) == 1 else f"1,{len(lines)}"
    text = b"".join(b"+%s\n" % line for line in lines) + (b"" if ends_in_line else b"\\ No newline at end of file\n")
    return f"{head}--- /dev/null\n+++ b/{path}\n@@ -0,0 +{count} @@\n".encode() + text


async def packed(workdir: str, entries: Sequence[FolderEntry]) -> AsyncGenerator[bytes, None]:
    """The archive of it, as `tar` in the box would write it."""
    file, top = io.BytesIO(), PurePosixPath(workdir).relative_to(HOME)
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for entry in sorted(entries, key=lambda each: each.path.encode()):
            member = tarfile.TarInfo(str(top / entry.path))
            member.mode, member.mtime, member.uid, member.gid = entry.mode, entry.mtime, 1000, 1000
            member.type = tarfile.DIRTYPE if entry.data is None else tarfile.REGTYPE
            member.size = len(entry.data or b"")
            tar.addfile(member, io.BytesIO(entry.data or b""))
    yield file.getvalue()
