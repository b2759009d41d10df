"""Trees of files that somebody else made are written into their folder and nowhere else."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.images.tree import Tree, copy, unpack


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
