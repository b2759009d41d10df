"""Trees of files that somebody else made are written into their folder and nowhere else."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.sandboxes.images.imports import ImageSource, moves_of
from rollcage.sandboxes.images.tree import Tree, copy, unpack


def _entry(tar: tarfile.TarFile, name: str, *, content: bytes = b"", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content))


def test_a_hostile_archive_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        _entry(tar, str(outside / "absolute"), content=b"x")
        _entry(tar, "link", type=tarfile.SYMTYPE, linkname=str(outside))
        _entry(tar, "up", type=tarfile.SYMTYPE, linkname="../../../../../../" + str(outside))
        _entry(tar, "link/through", content=b"x")
        _entry(tar, "up/through2", content=b"x")
        _entry(tar, "plain", type=tarfile.SYMTYPE, linkname=str(outside / "secret"))
        _entry(tar, "plain", content=b"mine")
        _entry(tar, "program", content=b"x", mode=0o6755)
        _entry(tar, "device", type=tarfile.CHRTYPE, devmajor=1, devminor=1)
        _entry(tar, "pipe", type=tarfile.FIFOTYPE)
    data.seek(0)
    with Tree(target) as tree:
        unpack(io.BufferedReader(data), tree, lambda path: path)
    assert [path.name for path in outside.iterdir()] == ["secret"] and (outside / "secret").read_text() == "secret"
    inner = target / str(outside).lstrip("/")
    assert {path.name for path in inner.iterdir()} == {"through", "through2", "absolute"}
    assert (target / "plain").read_text() == "mine" and (target / "program").stat().st_mode & 0o7777 == 0o755
    assert not (target / "device").exists() and not (target / "pipe").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../out", "content": b"x"},
        {"name": "a/../../out", "content": b"x"},
        {"name": "hard", "type": tarfile.LNKTYPE, "linkname": "../outside/secret"},
        {"name": "hard", "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
        {"name": "loop/x", "content": b"x"},
        {"name": "file/x", "content": b"x"},
        {"name": "folder", "content": b"x"},
    ],
)
def test_what_makes_no_sense_in_an_archive_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        _entry(tar, "loop", type=tarfile.SYMTYPE, linkname="loop")
        _entry(tar, "file", content=b"x")
        _entry(tar, "folder", type=tarfile.DIRTYPE, mode=0o755)
        _entry(tar, **fields)  # type: ignore[arg-type]
    data.seek(0)
    with Tree(target) as tree, pytest.raises(UsageError, match="cannot take"):
        unpack(io.BufferedReader(data), tree, lambda path: path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "target"]


def test_a_copied_tree_keeps_links_times_and_rights_but_no_setuid(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "folder").mkdir(parents=True)
    target.mkdir()
    (source / "folder/file").write_text("x")
    os.utime(source / "folder/file", (1000, 1000))
    os.link(source / "folder/file", source / "twin")
    (source / "folder/file").chmod(0o4754)
    (source / "away").symlink_to("/etc")
    os.mkfifo(source / "pipe")
    fd = os.open(source, os.O_RDONLY)
    try:
        with Tree(target) as tree:
            copy(fd, tree, lambda path: path)
    finally:
        os.close(fd)
    found = (target / "folder/file").stat()
    assert (found.st_mode & 0o7777, found.st_mtime, found.st_nlink) == (0o754, 1000, 2)
    assert os.readlink(target / "away") == "/etc" and not (target / "pipe").exists()


def test_long_runs_of_zeros_become_holes(tmp_path: Path) -> None:
    content = b"begin" + bytes(8 << 20) + b"middle" + bytes(8 << 20)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        _entry(tar, "file", content=content)
    data.seek(0)
    with Tree(tmp_path) as tree:
        unpack(io.BufferedReader(data), tree, lambda path: path)
    assert (tmp_path / "file").read_bytes() == content
    assert (tmp_path / "file").stat().st_blocks * 512 < 6 << 20


def test_names_without_content_count_too(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for number in range(1000):
            _entry(tar, f"{number}/{number}/link", type=tarfile.SYMTYPE, linkname="x")
    data.seek(0)
    with Tree(tmp_path, limit=1 << 20) as tree, pytest.raises(UsageError, match=r"cannot take '85'"):
        unpack(io.BufferedReader(data), tree, lambda path: path)


def _head(kind: bytes, size: int = 0) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def _attribute(number: int) -> bytes:
    """A header for all that follows, of 1 kB in all, that sets what no other has set."""
    word = f"512 rollcage.{number:09}="
    return _head(tarfile.XGLTYPE, 512) + word.encode().ljust(511, b"x") + b"\n"


def _holes(number: int) -> bytes:
    """Where holes are, and that more of this follows; the first is a file's own header."""
    if number:
        return b"00000000001\0" * 42 + b"\1" * 8
    head = bytearray(_head(tarfile.GNUTYPE_SPARSE))
    head[482] = 1
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + sum(head[156:]) + 8 * 32)
    return bytes(head)


class _Endless(io.RawIOBase):
    """An archive whose blocks come from a function, without end; it counts them."""

    def __init__(self, block: Callable[[int], bytes]) -> None:
        self._block, self.blocks, self._rest = block, 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while len(self._rest) < len(buffer):
            self._rest += self._block(self.blocks)
            self.blocks += 1
        buffer[:] = self._rest[: len(buffer)]
        self._rest = self._rest[len(buffer) :]
        return len(buffer)


ENDLESS: dict[str, Callable[[int], bytes]] = {
    "a long name": lambda number: bytes(1024) if number else _head(tarfile.GNUTYPE_LONGNAME, 8 << 30),
    "the attributes of one file": lambda number: bytes(1024) if number else _head(tarfile.XHDTYPE, 7 << 30),
    "names of names": lambda number: _head(tarfile.GNUTYPE_LONGNAME),
    "attributes of all files": lambda number: _attribute(number) + _head(tarfile.FIFOTYPE),
    "holes": _holes,
    "one folder again and again": lambda number: _head(tarfile.DIRTYPE),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_archive_in_which_something_has_no_end_is_refused_before_it_fills_the_memory(
    what: str, tmp_path: Path
) -> None:
    source = _Endless(ENDLESS[what])
    with Tree(tmp_path, limit=4 << 20) as tree, pytest.raises(UsageError, match=r"no usable tar archive|--max-gb"):
        unpack(io.BufferedReader(source), tree, lambda path: path)
    assert source.blocks < 10_000


@pytest.mark.parametrize(
    ("folder", "fine"),
    [("/usr", False), ("/usr/local", False), ("/usr/lib/python3", False), ("/usr/src/app", True), ("/testbed", True)],
)
def test_the_folder_that_an_agent_works_in_holds_none_of_the_programs_that_judge_it(folder: str, fine: bool) -> None:
    with nullcontext() if fine else pytest.raises(UsageError, match=f"--workdir {folder}: the system's programs"):
        moves_of(ImageSource(path=Path("/nowhere"), workdir=folder))
