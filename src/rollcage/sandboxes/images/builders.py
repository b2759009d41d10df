"""Who builds Dockerfiles here: whichever of buildah, podman and docker works. We have no builder of our own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollcage.errors import SetupError

_ASK_S = 20.0
_ROOTLESS = ("cat", "/proc/self/uid_map")
"""In the user namespace that a builder makes: a line for the user, and one for the ids that are lent to it."""


class ImageBuilder(NamedTuple):
    """A builder: its commands, to which its own path is added in front."""

    name: str
    build: Sequence[str]
    """Followed by `-t TAG -f DOCKERFILE CONTEXT`."""
    save: Callable[[str, str], Sequence[str]]
    """From a tag and the path of an archive to be written."""
    ask: Sequence[str] = ()
    """Ends with 0 where it works at all, and builds nothing."""
    enter: Sequence[str] = ()
    """Followed by a command, which runs as root of an ordinary user's namespace, as `RUN` will."""


class BuilderSearch(NamedTuple):
    """What can build here, and why the others cannot."""

    tool: ImageBuilder | None
    others: dict[str, str]
    """By name: what is wrong with those that come before it."""

    @property
    def why(self) -> str:
        """What is wrong with all of them, in one line."""
        return "; ".join(f"{name}: {what}" for name, what in self.others.items())


def _push(tag: str, to: str) -> Sequence[str]:
    return ("push", "--disable-compression", tag, f"oci-archive:{to}")  # what is unpacked at once need not be packed


TOOLS = (
    # chroot: in a container, where most of us are, there is no right to do more. Without --force-rm a build that fails
    # leaves what it had mounted.
    ImageBuilder("buildah", ("bud", "--isolation", "chroot", "--layers", "--force-rm"), _push, ("info",), ("unshare",)),
    ImageBuilder(
        "podman",
        ("build", "--isolation", "chroot", "--layers", "--force-rm"),
        lambda tag, to: ("save", "--format", "oci-archive", "-o", to, tag),
        ("info",),
        ("unshare",),
    ),
    ImageBuilder(
        "docker",
        ("build",),
        lambda tag, to: ("save", "-o", to, tag),
        ("version", "--format", "{{.Server.Version}}"),
    ),
)


def find_builder() -> BuilderSearch:
    """The first that works."""
    others: dict[str, str] = {}
    for tool in TOOLS:
        if not (what := trouble(tool)):
            return BuilderSearch(tool, others)
        others[tool.name] = what
    return BuilderSearch(None, others)


def builder() -> ImageBuilder:
    """The first that works; SetupError with what is wrong with each."""
    found = find_builder()
    if found.tool is None:
        raise SetupError(f"no builder of images works here ({found.why})", remedy=remedy(found))
    return found.tool


def remedy(found: BuilderSearch) -> str:
    """What makes the first of those that are installed work, or installs one."""
    here = [name for name in found.others if shutil.which(name)]
    return _LENT if "buildah" in here or "podman" in here else "apt-get install buildah, with uidmap for ordinary users"


_LENT = (
    "apt-get install uidmap, and, as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER; "
    "or build as root"
)


def trouble(tool: ImageBuilder) -> str:
    """Why it cannot build here; empty where it can, as far as can be told without building."""
    if not shutil.which(tool.name):
        return "is not installed"
    if os.geteuid() and tool.enter:
        return _lacks_ids(tool)
    return _asked([tool.name, *tool.ask])[0] if tool.ask else ""


def _lacks_ids(tool: ImageBuilder) -> str:
    """Packages have files of several users: an ordinary user needs a range of ids for them."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"the user {os.geteuid()} has no entry in /etc/passwd"
    for program in ("newuidmap", "newgidmap"):
        if not shutil.which(program):
            return f"an ordinary user needs {program}, of the package uidmap"
    wrong, said = _asked([tool.name, *tool.enter, *_ROOTLESS])
    lines = [line.split() for line in said.splitlines() if len(line.split()) == 3]
    if not wrong and sum(int(line[2]) for line in lines) < 2:
        wrong = f"no ids are lent to the user {name} in /etc/subuid and /etc/subgid"
    return wrong


def _asked(command: Sequence[str]) -> tuple[str, str]:
    """What is wrong according to a command, and what it printed."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {_ASK_S:g} s", ""
    except OSError as error:
        return f"cannot be started: {error.strerror}", ""
    if ended.returncode:
        last = (ended.stderr.strip() or f"ended with {ended.returncode}").splitlines()[-1]
        return last[-200:], ended.stdout
    return "", ended.stdout
