"""Debian packages in an image: fetched by apt in a box, as an ordinary user, and unpacked; no script of theirs is run.

apt itself resolves and checks signatures; dpkg's own installation would need several users and a writable system.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.sandboxes.base import Sandbox, run, sh
from rollcage.sandboxes.images.build import Recipe, Say, do
from rollcage.types import HOME

WORK = ".rollcage-apt"
_ROOT = f"{HOME}/{WORK}"
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?")
_HOST = ("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/trusted.gpg.d", "var/lib/dpkg/status")
"""What apt must know of the host to add to its system; no other setting of the host's, which may hold secrets."""
_MOST_BYTES = 64 << 20
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


async def fetch(box: Sandbox, recipe: Recipe, environment: Mapping[str, str], *, host: bool, say: Say) -> None:
    """Unpack these packages, and what they depend on, in a folder below the box's home."""
    for package in recipe.packages:
        if not _PACKAGE.fullmatch(package):
            raise UsageError(f"apt package {package!r}: give a name, or name=version")
    if (await run(box, ["sh", "-c", "command -v apt-get dpkg-deb"])).code:
        raise SetupError("this system has no apt", remedy="import one that has, or install below home with --setup")
    etc, status = "/etc/apt", "/var/lib/dpkg/status"
    if host:
        await _bring_host_files(box)
        etc, status = f"{_ROOT}/etc/apt", f"{_ROOT}/var/lib/dpkg/status"
    sources = ""
    if recipe.sources:
        await box.write(f"{_ROOT}/sources.list", ("\n".join(recipe.sources) + "\n").encode())
        sources = f'Dir::Etc::sourcelist "{_ROOT}/sources.list"; Dir::Etc::sourceparts "/dev/null";'
    settings = f"""{sources}
        Dir::Etc "{etc}"; Dir::Etc::main "/dev/null"; Dir::Etc::parts "/dev/null";
        Dir::State "{_ROOT}/state"; Dir::State::status "{status}"; Dir::Cache "{_ROOT}/cache"; Dir::Log "{_ROOT}/log";
        Debug::NoLocking "true"; APT::Install-Recommends "false"; APT::Sandbox::User "";
        Acquire::Retries "3"; Acquire::Languages "none";
    """
    await box.write(f"{_ROOT}/apt.conf", settings.encode())
    env = {**environment, "APT_CONFIG": f"{_ROOT}/apt.conf", "DEBIAN_FRONTEND": "noninteractive"}
    folders = f"{_ROOT}/{{state/lists/partial,cache/archives/partial,log,system,etc/apt/preferences.d}}"
    await do(box, f"mkdir -p {folders}", env)
    say("apt-get update")
    # A source that cannot be reached may be one that nobody needs now.
    updated = await sh(box, "apt-get -q update", env=env, timeout_s=1 << 30)
    wanted = " ".join(recipe.packages)
    say(f"apt-get install {wanted}")
    try:
        await do(box, f"apt-get -q -y install --download-only {wanted}", env)
    except SandboxError as error:
        said = [line for line in updated.stderr.text.splitlines() if line.startswith(("E:", "W:"))][:3]
        raise SandboxError(f"{error}; apt-get update said: {' / '.join(said) or 'nothing'}") from error
    unpack = (
        f"cd {_ROOT}/cache/archives && for deb in *.deb; do [ -e $deb ] || break; dpkg-deb -x $deb ../../system; done"
    )
    await do(box, unpack, env)


async def merged_folders(box: Sandbox) -> tuple[str, ...]:
    """Those of /bin, /lib and so on that are links into /usr in this system, as packages do not know."""
    names = " ".join(_MERGED)
    listed = await do(
        box, f'for name in {names}; do [ "$(readlink /$name)" != usr/$name ] || echo $name; done', {}, cwd="/"
    )
    return tuple(listed.split())


def place(merged: Sequence[str]) -> Callable[[str], str | None]:
    """Where unpacked files belong in a part; nothing else that was written below home belongs there."""
    start = f"{WORK}/system"

    def placed(path: str) -> str | None:
        if path in (WORK, start):
            return "system"
        if not path.startswith(f"{start}/"):
            return None
        inner = path[len(start) + 1 :]
        first = inner.partition("/")[0]
        return f"system/usr/{inner}" if first in merged else f"system/{inner}"

    return placed


async def _bring_host_files(box: Sandbox) -> None:
    for name in _HOST:
        path = Path("/") / name
        for file in sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []:
            if file.is_file() and file.stat().st_size <= _MOST_BYTES and file.stat().st_mode & 0o004:
                await box.write(f"{_ROOT}/{name}{'/' + file.name if path.is_dir() else ''}", file.read_bytes())
