"""The agent's work as a patch: what setup left in the workdir is remembered, and compared with what the agent left.

git does both, in the box, with a repository of its own beside the workdir: whatever repository the task has in there
stays as it is, and nothing an agent writes into the workdir (attributes, ignore rules, hooks) decides what is shown.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import anyio

from rollcage.errors import SandboxError, UsageError
from rollcage.sandboxes.base import PATH, SHELL, Listed, Sandbox, run
from rollcage.sandboxes.files import SKIPPED
from rollcage.types import HOME

BEFORE = f"{HOME}/.rollcage/before.git"
"""Where the workdir as setup left it is remembered. Outside the workdir: verification sees it as it was then."""
HEAD = f"{BEFORE}/head"
"""What HEAD of a repository in the workdir was then."""
MAX_FILES = 20_000
MAX_MEGABYTES = 128
"""A workdir larger than this is not remembered: it would be kept twice on the box's disk."""
MAX_PATCH_BYTES = 1 << 20
TIMEOUT_S = 30.0

TESTS = r"(^|/)(tests?|__tests__|specs?)/|(^|/)(test_[^/]*|conftest\.py)$|([._](test|spec)|_test)\.[a-z]+$"
"""Files that are tests, by their paths."""
MAX_TESTS = 1000

_ENVIRONMENT = {
    "PATH": PATH,
    "GIT_DIR": BEFORE,
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}
_EMPTY = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""The tree with nothing in it, which git knows in every repository."""
_PATHS = " ".join(f"':(exclude,glob)**/{name}' ':(exclude,glob)**/{name}/**'" for name in SKIPPED)
_PATHS += " ':(top,exclude).rollcage/before.git'"  # where the workdir is home itself

_MAKE = r"""
mkdir -p -- "$GIT_DIR/objects" "$GIT_DIR/refs" "$GIT_DIR/info" || exit 5
echo 'ref: refs/heads/before' >"$GIT_DIR/HEAD"
printf '%s\n' '[core]' 'bare = false' 'compression = 0' 'hooksPath = /dev/null' 'fsmonitor = false' >"$GIT_DIR/config"
printf '* !diff !text !eol !filter !ident !working-tree-encoding\n' >"$GIT_DIR/info/attributes"
""".strip()

# Repositories within are not remembered: git would start itself in there, and run the monitor that the agent gave them.
# Most workdirs are empty before the agent works: for those, none of the programs is started.
_REMEMBER = f"""
set -o pipefail
shopt -s dotglob nullglob
[ -d "$1" ] || mkdir -p -- "$1" || exit 2
cd -- "$1" && command -v git >/dev/null || exit 3
found=(*)
if [ ${{#found[@]}} -gt 0 ]; then
  sizes=$(find . -type f -printf '%s\\n' | awk '{{ bytes += $1 }} END {{ print NR, int(bytes / 1048576) }}')
  [ "${{sizes% *}}" -le {MAX_FILES} ] && [ "${{sizes#* }}" -le {MAX_MEGABYTES} ] || exit 4
fi
{_MAKE}
[ ${{#found[@]}} -gt 0 ] || {{ echo {_EMPTY} >"$GIT_DIR/before"; exit; }}
export GIT_WORK_TREE="$1"
git add --all --force --ignore-errors -- . {_PATHS} 2>/dev/null
git ls-files --stage -z | sed -zn 's/^160000 [^\t]*\t//p' | git update-index -z --force-remove --stdin &&
  git write-tree >"$GIT_DIR/before" || {{ rm -rf -- "$GIT_DIR"; exit 6; }}
git ls-files -z | grep -zE '{TESTS}' | head -z -n {MAX_TESTS}
[ ! -e .git ] || env -u GIT_DIR -u GIT_WORK_TREE git rev-parse -q --verify HEAD >{HEAD} 2>/dev/null
# Interpreters are setup's, and nothing that make prefers to the Makefile of setup's is.
for name in .venv/bin/python* venv/bin/python*; do printf '%s\\0' "$name"; done
if [ -e Makefile ] || [ -e makefile ]; then
  for name in GNUmakefile makefile; do [ -e "$name" ] || printf '%s\\0' "$name"; done
fi
exit 0
"""

# New files are only named in the index, not stored: there may be no room left for a second copy of them. The index is
# made anew: the old one's times and sizes would be believed, and a quick agent changes a file within one tick.
_COMPARE = f"""
before=$2
[ -n "$before" ] || {{ [ -s "$GIT_DIR/before" ] && before=$(<"$GIT_DIR/before"); }} || exit 3
cd -- "$1" || exit 4
# Of an empty workdir, nothing may have been written.
[ -e "$GIT_DIR/HEAD" ] || {{
{_MAKE}
}}
export GIT_WORK_TREE="$1" GIT_INDEX_FILE="/tmp/.index-$$-$RANDOM$RANDOM"
trap 'rm -f -- "$GIT_INDEX_FILE"' EXIT
[ "$before" = {_EMPTY} ] || git read-tree "$before" || exit 5
git add --intent-to-add --force --ignore-errors -- . {_PATHS} 2>/dev/null
git diff --no-color --no-ext-diff --no-textconv --find-renames --ignore-submodules "$before" --
"""


# A file that was written to, or whose rights were changed, has another time of change: no program can set that.
_LIST = r"""cd -- "$1" && exec find . -path ./.rollcage -prune -o ! -type d -printf '%P\t%s\t%C@\0'"""
MAX_LISTING_BYTES = 4 << 20


class Patch(NamedTuple):
    """What the agent changed, as `git diff` writes it."""

    text: str
    truncated: bool
    """It was longer than we keep; the text is cut at a whole line."""

    @property
    def changed(self) -> frozenset[str] | None:
        """The files that it is about; None where it does not name all of them as they are called."""
        heads = [line for line in self.text.splitlines() if line.startswith("diff --git ")]
        if self.truncated or any('"' in line for line in heads):
            return None
        return frozenset(line.rpartition(" b/")[2] for line in heads)


class Remembered(NamedTuple):
    """What is known of a workdir that was remembered."""

    tests: tuple[str, ...] = ()
    """What in it is not the agent's to change: tests, interpreters, what make would read before the Makefile."""
    empty: bool = False
    """Nothing was in it."""
    listing: frozenset[str] | None = None
    """All files of it, where there is no git to remember them; for the same box alone."""


async def snapshot_workdir(box: Sandbox, workdir: str) -> Remembered | None:
    """Remember the workdir as it is, made if there is none; None where it is too large for that, or there is no git."""
    if isinstance(box, Listed):
        with suppress(SandboxError):  # the command says why
            if await box.names_in(workdir) == ():
                return Remembered(empty=True)
    script = _shell(_REMEMBER, workdir)
    ran = await run(
        box, script, env=_ENVIRONMENT, inherit_image_env=False, cwd="/", timeout_s=TIMEOUT_S, limit=MAX_PATCH_BYTES
    )
    if ran.code == 2:
        raise UsageError(f"workdir {workdir}: {ran.stderr.text.strip()}")
    if ran.code:
        return None
    names = ran.stdout.data.decode("utf-8", "surrogateescape").split("\0")[:-1]
    return Remembered(() if ran.stdout.truncated else tuple(f"{workdir}/{name}" for name in names))


async def patch_of(
    box: Sandbox, workdir: str, before: Remembered, *, after: anyio.Event | None = None, timeout_s: float = TIMEOUT_S
) -> Patch | None:
    """What was changed in the workdir since it was remembered; None where it was not, or cannot be told.

    `after`: it is looked at only then.
    """
    script = f"set -o pipefail; read -r; ({_COMPARE}) | head --bytes={MAX_PATCH_BYTES + 1}"
    ran = await run(
        box,
        _shell(script, workdir, _EMPTY if before.empty else ""),
        stdin=b"\n",
        stdin_after=after,
        env=_ENVIRONMENT,
        inherit_image_env=False,
        cwd="/",
        timeout_s=timeout_s,
        limit=MAX_PATCH_BYTES + 1,
    )
    if len(ran.stdout.data) > MAX_PATCH_BYTES:
        whole_lines = ran.stdout.data[: ran.stdout.data.rfind(b"\n", 0, MAX_PATCH_BYTES) + 1]
        return Patch(whole_lines.decode("utf-8", "replace"), truncated=True)
    return Patch(ran.stdout.text, truncated=False) if ran.code == 0 else None


async def listing_of(box: Sandbox, workdir: str) -> frozenset[str] | None:
    """Every file of the workdir with its size and its time of change, where there is no git to remember them; None
    where they are too many."""
    ran = await run(
        box,
        _shell(_LIST, workdir),
        env={"PATH": PATH},
        inherit_image_env=False,
        cwd="/",
        timeout_s=TIMEOUT_S,
        limit=MAX_LISTING_BYTES,
    )
    if ran.code or ran.stdout.truncated:
        return None
    return frozenset(ran.stdout.data.decode("utf-8", "surrogateescape").split("\0")[:-1])


def changed_since(before: frozenset[str], now: frozenset[str]) -> frozenset[str]:
    """The files that were made or changed between two listings."""
    return frozenset(entry.rsplit("\t", 2)[0] for entry in now - before)


def _shell(script: str, *words: str) -> list[str]:
    return [*SHELL, script, "patch", *words]
