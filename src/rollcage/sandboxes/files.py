"""Takes files out of a box and moves folders between boxes; the host never opens a path that an agent made."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from rollcage.errors import SandboxError
from rollcage.sandboxes.base import PATH, SHELL, CapturedOutput, Sandbox, Tail, tail
from rollcage.sandboxes.contents import FolderEntry
from rollcage.types import HOME

SKIPPED = (".git", "__pycache__", "node_modules", ".venv")
"""Folders whose content is nobody's work."""
MAX_FILES = 200
MAX_FILE_BYTES = 256 << 10
MAX_TOTAL_BYTES = 2 << 20
_LISTING_LIMIT = 16 << 20


class NotCopied(SandboxError):
    """A folder is of a kind that cannot be packed or unpacked: too deep, more than fits, or too much for the time."""


class Collected(NamedTuple):
    """Text files by path, and the paths that were left where they were."""

    files: dict[str, str]
    extra: dict[str, str]
    """Why each was left: `binary`, `too large (123 bytes)`, `symlink`, ..."""
    listed: tuple[str, ...] = ()
    """Every path that there is, collected or not."""
    unlisted: bool = False
    """There were more than could be listed."""


async def collect(
    box: Sandbox, folder: str, *, before: str = "", begun: anyio.Event | None = None, timeout_s: float = 30
) -> Collected:
    """The text files below a folder, within limits; symlinks are never followed.

    `before`: shell text that is run first, in the same process, with the folder as its `$1`; its failure is an error.
    `begun`: set as soon as that is done.
    """
    prune = [word for name in SKIPPED for word in ("-name", name, "-o")][:-1]
    if folder in (HOME, "/root"):  # what we keep at home is nobody's work either
        prune += ["-o", "-path", "./.rollcage"]
    look = ["find", ".", "(", *prune, ")", "-prune", "-o", "!", "-type", "d", "-printf", r"%y %s %P\0"]
    # One process for both: it lists, and packs what it is then told to. A row without a name ends the listing.
    pack = "exec tar --create --ignore-failed-read --no-recursion --null --files-from=- --file=-"
    script = f'{{ {before}\n:; }} </dev/null\ncd -- "$1" || exit 1\nshift; printf "\\0"; "$@"; printf "\\0"; {pack}'
    argv = [*SHELL, script, "collect", folder, *look]
    listing, archive, complaints = (
        _Listing(begun or anyio.Event()),
        Tail(2 * MAX_TOTAL_BYTES + MAX_FILES * 4096),
        Tail(64 << 10),
    )
    names: list[bytes] = []
    extra: dict[str, str] = {}
    listed: list[str] = []
    async with box.spawn(argv, env={"PATH": PATH}, inherit_image_env=False) as process:
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(complaints.drain, process.stderr)
                await listing.read(process.stdout)
                names, extra, listed = _chosen(listing.rows)
                tasks.start_soon(archive.drain, process.stdout)
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    await process.stdin.send(b"".join(name + b"\0" for name in names))
                await process.stdin.aclose()
            await process.wait()
    if not listing.begun.is_set():
        raise SandboxError(f"cannot look into {folder}: {complaints.output.text.strip()}")
    files: dict[str, str] = {}
    if names:
        files, binary = _untar(archive.output)
        extra |= dict.fromkeys(binary, "binary")
    return Collected(files, dict(sorted(extra.items())), tuple(listed), not listing.whole)


def collected_from(entries: Sequence[FolderEntry]) -> Collected:
    """The same of a folder that was read whole."""
    contents = {
        each.path.encode(): each.data for each in entries if each.data is not None and not is_skipped(each.path)
    }
    names, extra, listed = _chosen(sorted(b"f %d %s" % (len(data), name) for name, data in contents.items()))
    files, binary = _texts((name.decode(), contents[name]) for name in names)
    return Collected(files, dict(sorted({**extra, **dict.fromkeys(binary, "binary")}.items())), tuple(listed))


def is_skipped(path: str) -> bool:
    """Whether it is nobody's work."""
    return not set(SKIPPED).isdisjoint(path.split("/"))


class _Listing:
    """Rows that end in NUL characters, after a NUL; an empty row is the last."""

    def __init__(self, begun: anyio.Event) -> None:
        self._data = bytearray()
        self._cut = self.whole = False
        self.begun = begun
        """Set once anything came."""

    @property
    def rows(self) -> list[bytes]:
        """What came; of a longer listing the last part."""
        rows = bytes(self._data).split(b"\0")
        return sorted(rows[1:] if self._cut else rows)

    async def read(self, stream: ByteReceiveStream) -> None:
        """Read to the end of the rows, not of the stream."""
        async for chunk in stream:
            seen = max(0, len(self._data) - 1)
            self._data += chunk
            self.begun.set()
            if self._data.find(b"\0\0", seen) >= 0:
                self.whole = not self._cut
                return
            if len(self._data) > _LISTING_LIMIT:
                del self._data[:-_LISTING_LIMIT]
                self._cut = True


def _chosen(rows: list[bytes]) -> tuple[list[bytes], dict[str, str], list[str]]:
    """The names to be collected, why the others are not, and all of them."""
    names: list[bytes] = []
    extra: dict[str, str] = {}
    listed: list[str] = []
    total = 0
    for row in rows:
        kind, _, rest = row.partition(b" ")
        size, _, name = rest.partition(b" ")
        if not name:
            continue
        listed.append(name.decode("utf-8", "replace"))
        if why := _reason(kind, int(size), total, len(names)):
            if len(extra) < MAX_FILES:
                extra[name.decode("utf-8", "replace")] = why
        else:
            names.append(name)
            total += int(size)
    return names, extra, listed


_KINDS = {b"l": "symlink", b"p": "pipe", b"s": "socket", b"c": "device", b"b": "device"}


def _reason(kind: bytes, size: int, total: int, count: int) -> str:
    """Why a file is not collected; empty where it is."""
    if kind != b"f":
        return _KINDS.get(kind, "not a regular file")
    if size > MAX_FILE_BYTES:
        return f"too large ({size} bytes)"
    return "too many files" if total + size > MAX_TOTAL_BYTES or count >= MAX_FILES else ""


def _untar(archive: CapturedOutput) -> tuple[dict[str, str], list[str]]:
    if archive.truncated:
        return {}, []
    with tarfile.open(fileobj=io.BytesIO(archive.data), mode="r:") as tar:
        streams = ((member.name, tar.extractfile(member) if member.isreg() else None) for member in tar)
        return _texts((name, stream.read() if stream else b"\0") for name, stream in streams)


def _texts(contents: Iterable[tuple[str, bytes]]) -> tuple[dict[str, str], list[str]]:
    """Those that are texts, and the names of the others."""
    files: dict[str, str] = {}
    binary: list[str] = []
    for name, data in contents:
        try:
            if b"\0" in data:
                raise UnicodeError
            files[name] = data.decode()
        except UnicodeError:
            binary.append(name)
    return files, binary


async def copy_path(
    source: Sandbox, target: Sandbox, path: str, *, timeout_s: float = 60, exclude: Sequence[str] = ()
) -> None:
    """Copy a folder or file to the same place in another box; it is packed and unpacked inside the boxes.

    `exclude`: patterns of what is left out. NotCopied where that fails because of what it is; part of it may be in the
    other box then.
    """
    # An agent may take its own rights away from what it made; it made it, so they can be given back. Whatever else it
    # did to the path (removed it, made it a link, a pipe) comes over as nothing.
    readable = """
        base=${1%/*} name=${1##*/}
        base=${base:-/}
        for path in "$HOME" "$base"; do [ -L "$path" ] || chmod u+rwx -- "$path"; done
        [ -L "$1" ] || [ ! -d "$1" ] || chmod -R u+rwX -- "$1"
        if [ ! -L "$1" ] && { [ -d "$1" ] || [ -f "$1" ]; }; then names=("$name"); else names=(); fi
        shift
        exec tar --create --sparse --one-file-system "$@" --directory "$base" --file=- --files-from=/dev/null -- \\
          "${names[@]}"
    """
    left_out = [f"--exclude={pattern}" for pattern in exclude]
    pack = [*SHELL, readable, "pack", path, *left_out]
    # An image may have brought something to the same place.
    script = """
        base=${1%/*}
        base=${base:-/}
        rm -rf -- "$1" && mkdir -p -- "$base" || exit 1
        exec tar --extract --no-same-owner --directory "$base" --file=-
    """
    unpack = [*SHELL, script, "unpack", path]

    async def pump(stream: ByteReceiveStream, sink: ByteSendStream) -> None:
        try:
            async for chunk in stream:
                await sink.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the unpacking side ended early: its exit code tells why
        finally:
            await sink.aclose()

    errors: dict[str, CapturedOutput] = {}

    async def listen(name: str, stream: ByteReceiveStream) -> None:
        errors[name] = await tail(stream, 2000)

    with anyio.move_on_after(timeout_s) as scope:
        plain = {"PATH": PATH}
        async with (
            source.spawn(pack, env=plain, inherit_image_env=False, cwd="/") as packing,
            target.spawn(unpack, env=plain, inherit_image_env=False, cwd="/") as unpacking,
        ):
            await packing.stdin.aclose()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen, "packing", packing.stderr)
                tasks.start_soon(listen, "unpacking", unpacking.stderr)
                tasks.start_soon(listen, "unpacked", unpacking.stdout)
                await pump(packing.stdout, unpacking.stdin)
            codes = (await packing.wait(), await unpacking.wait())
    if scope.cancelled_caught:
        raise NotCopied(f"copying {path} to a fresh box took more than {timeout_s:g} s")
    if any(codes):
        said = " ".join(output.text.strip() for output in errors.values() if output.data)
        raise NotCopied(f"cannot copy {path} to a fresh box: {said[-500:] or codes}")


async def unpack_archive(
    box: Sandbox, folder: str, chunks: AsyncIterable[bytes], *, instead_of: Sequence[str] = ()
) -> None:
    """Unpack a tar archive in a folder of a box, which is made where it is not there; modes and links are kept.

    `instead_of`: paths that are removed before, by their names in that folder or as a whole.
    """
    script = """
        mkdir -p -- "$1" && cd -- "$1" && shift && rm -rf -- "$@" || exit 1
        exec tar --extract --no-same-owner --same-permissions --file=-
    """
    argv = [*SHELL, script, "unpack", folder, *instead_of]
    async with box.spawn(argv, env={"PATH": PATH}, inherit_image_env=False, cwd="/") as process:
        try:
            async for chunk in chunks:
                await process.stdin.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # its exit code tells why it ended early
        await process.stdin.aclose()
        said = (await tail(process.stderr, 2000)).text.strip()
        if code := await process.wait():
            raise SandboxError(f"cannot put files into {folder}: {said or code}")
