"""What of a verifier's script only installs something: those lines are run once where the task's image is built, and
verification finds it installed, or in a cache, and needs no network.

No line that could show the agent anything of the tests is among them: of `uvx ... pytest /tests/x.py`, the tool is
installed and asked for its version.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FETCHES = re.compile(
    r"(?:^|[;&|(]|\bsudo)\s*"
    r"((?:apt|apt-get|[\w./-]*pip[\d.]*|npm) (?:install|i)\b|apt-get update|uvx?|curl|wget|git clone)\b"
)
"""Commands that fetch something, where a line of a script begins with one."""
_UV = re.compile(r"astral\.sh/uv/(?:([\d.]+)/)?install\.sh")
_SEPARATORS = frozenset(("&&", "||", ";", "&"))
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PIP = re.compile(r"([\w./$\"{}-]*/)?pip[\d.]*")
_PYTHON = re.compile(r"([\w./$\"{}-]*/)?python[\d.]*")
_READY = re.compile(r".*(/bin/activate|\.local/bin/env)\"?")
"""Files that a script reads to find what was installed."""
_TAKES_VALUE = frozenset(
    "-p --python -w --with --with-requirements --with-editable --from -c --constraints -b --build-constraints "
    "--index --default-index -i --index-url --extra-index-url -f --find-links --index-strategy --keyring-provider "
    "--resolution --prerelease --exclude-newer --link-mode --cache-dir --python-platform --refresh-package "
    "--reinstall-package -P --upgrade-package --project --directory --extra --group --env-file".split()
)
"""Options of uv's that the word after belongs to."""
_MOST_BYTES = 256 << 10
_HELPER = re.compile(r"\"?(?:/tests|\$\{?(?:TEST_DIR|TESTS_DIR|T_BENCH_TEST_DIR)\}?)\"?/([\w.-]+\.sh)\"?")

_HEAD = """\
export DEBIAN_FRONTEND=noninteractive UV_LINK_MODE=copy
cd "$(mktemp -d)" && mkdir -p /opt/rollcage/wheels
failed() { echo "not installed beforehand: what $1 says"; }
get_uv() {
  command -v uvx >/dev/null || eval "$2" || true
  export PATH="$HOME/.local/bin:$PATH"
  command -v uvx >/dev/null || PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install -q "uv$1" || return 1
  mkdir -p "$HOME/.local/bin"
  for name in uv uvx; do
    [ -e "$HOME/.local/bin/$name" ] || ln -s "$(command -v "$name")" "$HOME/.local/bin/$name"
  done
  [ -e "$HOME/.local/bin/env" ] || echo 'export PATH="$HOME/.local/bin:$PATH"' > "$HOME/.local/bin/env"
}
"""
_TAIL = """\
[ ! -d /etc/apt ] || { mkdir -p /etc/apt/apt.conf.d; echo 'Acquire::Retries "0";' > /etc/apt/apt.conf.d/99warmed; }
exit 0
"""
"""Where there is no network, apt would wait for it, and try again."""


class InstallStep(NamedTuple):
    """A line of a verifier's script that only installs something."""

    path: Path
    line: int
    commands: tuple[str, ...]
    whole: bool
    """Whether nothing that fetches was left out of it."""


def steps_of(script: Path, helpers: bool = True) -> Iterator[InstallStep]:
    """The lines of a script that only install something, those of scripts beside it that it runs among them."""
    for number, line in _lines(script):
        commands, whole = [], True
        for command in _simple(line):
            found = _installing(command)
            helper = _HELPER.fullmatch(command[-1]) if helpers and command[0] in ("bash", "sh", "source", ".") else None
            if helper:
                yield from steps_of(script.parent / helper[1], helpers=False)
            elif found:
                commands += found
            else:
                whole = whole and not FETCHES.search(" ".join(command))
        if commands:
            yield InstallStep(script, number, tuple(commands), whole)


def script_of(steps: Sequence[InstallStep]) -> str:
    """The script that a build runs at its end; empty where there is nothing to do. It says which line failed, and goes
    on: the image is of use all the same."""
    if not any(FETCHES.search(command) or "get_uv" in command for step in steps for command in step.commands):
        return ""
    body = "".join(
        f"eval {shlex.quote(command)} </dev/null || failed {shlex.quote(f'{step.path.name}:{step.line}')}\n"
        for step in steps
        for command in step.commands
    )
    return f"{_HEAD}{body}{_TAIL}"


def _lines(script: Path) -> Iterator[tuple[int, str]]:
    """Those that say something, by their first number; a line that ends with a backslash goes on in the next."""
    if script.is_symlink() or not script.is_file() or script.stat().st_size > _MOST_BYTES:
        return
    begun, text = 0, ""
    for number, line in enumerate(script.read_text(errors="replace").splitlines(), 1):
        begun = begun or number
        text += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        if text.strip() and not text.lstrip().startswith("#"):
            yield begun, text.strip()
        begun, text = 0, ""


def _simple(line: str) -> Iterator[list[str]]:
    """The simple commands and pipelines of a line, as words with their quotes."""
    words: list[str] = []
    try:
        reader = shlex.shlex(line, posix=False, punctuation_chars="();<>|&")
        reader.whitespace_split = True
        found = list(reader)
    except ValueError:  # a quote that is closed in another line
        return
    for word in (*found, ";"):
        if word not in _SEPARATORS:
            words.append(word)
        elif words:
            yield words
            words = []


def _installing(words: Sequence[str]) -> list[str]:
    """What to run of a simple command; nothing where it does more than to install."""
    text = " ".join(words)
    if found := _UV.search(text):
        version = f"=={found[1]}" if found[1] else ""
        return [f"get_uv '{version}' {shlex.quote(text)}"]
    if any(word in ("(", ")", "|", "<", "<<", "<<<") or "$(" in word or "`" in word for word in words):
        return []
    plain = _without_output(words)
    start = next((place for place, word in enumerate(plain) if not _ASSIGNMENT.match(word) and word != "sudo"), None)
    if start is None:
        return []
    before, rest = [word for word in plain[:start] if word != "sudo"], plain[start:]
    return [" ".join((*before, *command)) for command in _known(rest)]


def _without_output(words: Sequence[str]) -> list[str]:
    """Without `> /dev/null` and the like."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word in (">", ">>", ">&", "&>"):
            if not skip and kept and kept[-1] in ("1", "2"):
                kept.pop()
            skip = not skip
        else:
            kept.append(word)
    return kept


def _known(words: Sequence[str]) -> list[Sequence[str]]:
    name, more = words[0], list(words[1:])
    first = next((word for word in more if not word.startswith("-")), "")
    if name in ("apt", "apt-get"):
        return [words] if first in ("update", "install") else []
    if _PYTHON.fullmatch(name) and more[:2] == ["-m", "pip"]:
        return _pip([name, "-m", "pip"], more[2:])
    if _PYTHON.fullmatch(name) and more[:2] == ["-m", "venv"]:
        return [words]
    if _PIP.fullmatch(name):
        return _pip([name], more)
    if name == "npm":
        return [words] if first in ("install", "i") and {"-g", "--global"} & set(more) else []
    if name in ("source", ".") and more and _READY.fullmatch(more[0]):
        return [words]
    if name == "export":
        return [words] if more and all(_ASSIGNMENT.match(word) for word in more) else []
    return _uv(name, more)


def _pip(pip: Sequence[str], words: Sequence[str]) -> list[Sequence[str]]:
    """What is wanted is installed, and kept as wheels for environments that the verifier makes."""
    if words[:1] != ["install"] or any("/tests" in word or "TEST_DIR" in word for word in words):
        return []
    named = [word for word in words[1:] if not word.startswith("-") and "/" not in word]
    kept = [[*pip, "download", "-q", "-d", "/opt/rollcage/wheels", *named]] if named else []
    return [[*pip, *words], *kept]


def _uv(name: str, words: Sequence[str]) -> list[Sequence[str]]:
    if name == "uv" and list(words[:2]) in (["pip", "install"], ["tool", "install"]):
        return [[name, *words]]
    if name == "uv" and words[:1] in (["init"], ["add"], ["venv"], ["python"]):
        return [[name, *words]]
    if name == "uvx":
        return _tool(["uvx"], words)
    if name == "uv" and list(words[:2]) == ["tool", "run"]:
        return _tool(["uv", "tool", "run"], words[2:])
    if name == "uv" and words[:1] == ["run"]:
        return _tool(["uv", "run"], words[1:])
    return []


def _tool(command: Sequence[str], words: Sequence[str]) -> list[Sequence[str]]:
    """The tool with what it is to have, asked for its version in place of doing anything."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in _TAKES_VALUE else 1
    if place >= len(words):
        return []
    tool = words[place]
    if "/" in tool or "$" in tool or tool.endswith(".py"):
        return [[*command, *words[:place], "python", "-c", "pass"]] if command[-1] == "run" else []
    return [[*command, *words[:place], tool, "--version"]]
