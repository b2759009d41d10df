"""What of an image's environment verify commands get: nothing that leads into the agent's work.

An image says `PYTHONPATH=/testbed`, the agent writes /testbed/sitecustomize.py, and every Python of the verifier runs
it. So whatever an image sets is judged as its PATH is: by where it leads, links followed, in the box.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from rollcage.sandboxes.base import PATH, SHELL, Imaged, Sandbox, run

SEARCHED = frozenset(
    "PATH PYTHONPATH LD_LIBRARY_PATH LIBRARY_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH OBJC_INCLUDE_PATH NODE_PATH "
    "CLASSPATH PERL5LIB PERLLIB RUBYLIB GEM_PATH GOPATH R_LIBS R_LIBS_USER R_LIBS_SITE CDPATH GCONV_PATH "
    "PKG_CONFIG_PATH GIT_EXEC_PATH".split()
)
"""Lists of folders in which programs look for more of themselves. What is relative in them leads to wherever a command
is started, the workdir: an empty entry too, as a colon at the end makes one."""

RUNNING = frozenset(
    "BASH_ENV ENV PROMPT_COMMAND PS0 PS4 SHELLOPTS BASHOPTS PYTHONSTARTUP PYTHONHOME PYTHONUSERBASE PYTHONBREAKPOINT "
    "PYTHONWARNINGS PYTEST_ADDOPTS PYTEST_PLUGINS LD_PRELOAD LD_AUDIT NODE_OPTIONS JAVA_TOOL_OPTIONS _JAVA_OPTIONS "
    "JDK_JAVA_OPTIONS MAVEN_OPTS MAVEN_ARGS GRADLE_OPTS PERL5OPT PERL5DB RUBYOPT LUA_INIT LUA_PATH LUA_CPATH MAKEFILES "
    "MAKEFLAGS GNUMAKEFLAGS OPENSSL_CONF OPENSSL_MODULES R_PROFILE R_PROFILE_USER R_ENVIRON R_ENVIRON_USER".split()
)
"""Variables that make programs run code or read settings by themselves: kept only where all in them is known to lead
outside, or to nowhere."""

_HARMLESS = re.compile(r"(--[\w-]+|-X[\w:+-]+)(=[\d.]+[kmgt]?)?|-\w?\d*|\d+", re.IGNORECASE | re.ASCII)
"""An option that names no file."""
_NAMING = re.compile(r"(-[\w:=+.-]*)?/[^$`~]*", re.ASCII)
"""A path from the root, perhaps after an option's name."""
_WORD = re.compile(r"/[^\s:;,'\"=|&<>()]*")
_ALSO = ("/proc",)
"""A link may lead there, and from there to wherever a command was started."""

# Names may hold anything, newlines too: what comes back is a number for each.
_INSIDE = """
folders=()
for folder; do folders+=("$folder" "$(readlink -f -- "$folder")"); done
readlink -f / >/dev/null || exit 1
while IFS= read -r -d '' path; do
  real=$(readlink -f -- "$path") inside=0
  for folder in "${folders[@]}"; do
    if [ -n "$folder" ] && [[ $path/ == "$folder"/* || $real/ == "$folder"/* ]]; then inside=1; fi
  done
  echo $inside
done
"""


async def environment_from(box: Sandbox, work: Sequence[str] | None) -> tuple[dict[str, str], tuple[str, ...]]:
    """What verify commands get of the image's environment, PATH in any case; and the names of what they do not get.

    `work`: the folders of the agent's work; None: everything is, the verifier's own programs too.
    """
    given = dict(box.image_env) if isinstance(box, Imaged) else {}
    if work is None:
        return {"PATH": PATH, **given}, ()
    places = {path for value in given.values() for text in _paths(value) for path in _on_the_way(text)}
    inside = await _inside(box, sorted(places), work)

    def leads_in(text: str) -> bool:
        return any(place in inside for path in _paths(text) for place in _on_the_way(path))

    kept: dict[str, str] = {}
    for name, value in given.items():
        if name in SEARCHED:
            entries = [entry for entry in value.split(":") if entry.startswith("/") and not leads_in(entry)]
            if entries or not value:
                kept[name] = ":".join(entries)
        elif not leads_in(value) and (not _runs(name) or all(map(_is_clear, value.split()))):
            kept[name] = value
    lost = tuple(sorted(name for name, value in given.items() if kept.get(name) != value))
    return {**kept, "PATH": kept.get("PATH") or PATH}, lost


def _runs(name: str) -> bool:
    return name in RUNNING or name.startswith("BASH_FUNC_")


def _is_clear(word: str) -> bool:
    return bool(_HARMLESS.fullmatch(word) or _NAMING.fullmatch(word))


def _paths(value: str) -> set[str]:
    """What could be paths from the root in a value, be it one, a list of them, or options that name some."""
    return {text[text.index("/") :] for text in (value, *value.split(":"), *_WORD.findall(value)) if "/" in text}


def _on_the_way(path: str) -> list[str]:
    """The path, and every folder above it: one in the work decides, wherever the agent made it lead from there."""
    pure = PurePosixPath(f"/{path.lstrip('/')}")
    return [str(each) for each in (pure, *pure.parents) if len(each.parts) > 1]


async def _inside(box: Sandbox, paths: Sequence[str], work: Sequence[str]) -> frozenset[str]:
    """Which of these lead into the work; all of them where that cannot be told."""
    if not paths:
        return frozenset()
    told = await run(
        box,
        [*SHELL, _INSIDE, "inside", *work, *_ALSO],
        stdin=b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths),
        env={"PATH": PATH},
        inherit_image_env=False,
        cwd="/",
        limit=2 * len(paths) + 1,
    )
    answers = told.stdout.text.split()
    if told.code or len(answers) != len(paths):
        return frozenset(paths)
    return frozenset(path for path, answer in zip(paths, answers, strict=True) if answer != "0")
