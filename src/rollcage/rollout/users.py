"""Users of a task: whom its agent and its verifier see themselves as. It is a look: a box has one user on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollcage.errors import FileMissing, UsageError
from rollcage.sandboxes.base import ActsAs, BoxUser, Sandbox

_MOST = 1 << 20


async def user_of(box: Sandbox, name: str) -> BoxUser | None:
    """A user of the box's by name or number; None where none is named. UsageError where there is no such user."""
    if not name:
        return None
    try:
        text = (await box.read("/etc/passwd", limit=_MOST)).decode("utf-8", "replace")
    except FileMissing:
        text = ""
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) >= 6 and name in (fields[0], fields[2]) and fields[2].isdigit() and fields[3].isdigit():
            return BoxUser(int(fields[2]), int(fields[3]), fields[0], fields[5])
    if name.isdigit() and int(name) < 1 << 31:
        return BoxUser(int(name), int(name), name, "/")
    raise UsageError(f"there is no user {name!r} in /etc/passwd of the task's box")


@contextmanager
def acting_as(box: Sandbox, user: BoxUser | None, *, own_home: bool = True) -> Iterator[None]:
    """Commands in the block see themselves as that user; `own_home=False`: at home where the box has its home."""
    if user is None or not isinstance(box, ActsAs):
        yield
        return
    before = box.act_as(user if own_home else user._replace(home=""))
    try:
        yield
    finally:
        box.act_as(before)
