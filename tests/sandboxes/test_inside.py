"""What the programs in boxes share: one text of several modules, files put in place whole, and an end for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollcage.sandboxes.bundle import bundle
from rollcage.sandboxes.e2b.process import PROGRAM
from rollcage.sandboxes.inside import atomic, file_io, kernel
from rollcage.sandboxes.inside.atomic import NotAFile, replace_file, split_path

SOURCE = str(Path(__file__).parents[2] / "src")


def run(program: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Where nothing of ours can be imported, as in a box."""
    command = [sys.executable, "-I", "-S", "-c", program, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False)


def test_a_bundled_program_needs_nothing_but_its_text(tmp_path: Path) -> None:
    program, path = bundle(file_io, atomic), tmp_path / "new/file"
    written = run(program, "write", str(path), str(0o640), stdin=b"\0content")
    assert (written.returncode, written.stderr) == (0, b"")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"\0content", 0o640)
    assert run(program, "read", str(path), "4").stdout == b"\0con"
    assert run(program, "read", str(tmp_path / "none"), "4").returncode == file_io.MISSING
    assert SOURCE not in program, "no path of the host goes into a box"
    assert SOURCE not in PROGRAM


def test_a_module_that_is_not_bundled_is_not_found() -> None:
    missing = run(bundle(file_io), "read", "/x", "4")
    assert missing.returncode == 1 and b"ModuleNotFoundError" in missing.stderr


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")

    def fails(fd: int) -> None:
        os.write(fd, b"half")
        raise OSError(28, "full")

    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="full"):
            replace_file(folder, "file", 0o600, fails)
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]
        replace_file(folder, "file", 0o600, lambda fd: atomic.write_all(fd, b"after"))
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "after")]
    finally:
        os.close(folder)
    for path in ("/", "/a/..", "/a/."):
        with pytest.raises(NotAFile):
            split_path(path)


DAEMONS = """
import os, signal, sys, time
sys.path.append(sys.argv[1])
from rollcage.sandboxes.inside import kernel, processes
kernel.adopt_orphans()
ready, tell = os.pipe()
command = os.fork()
if not command:
    for _ in range(3):
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)  # its child is an orphan now
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(tell, b"x")
            time.sleep(600)
    os._exit(7)
for _ in range(3):
    os.read(ready, 1)
os.waitid(os.P_PID, command, os.WEXITED | os.WNOWAIT)
print(processes.end_all(command), processes.descendants())
"""


def test_everything_that_a_command_started_is_ended_and_its_exit_code_is_known() -> None:
    ended = run(DAEMONS, SOURCE)
    assert (ended.stdout, ended.returncode) == (b"7 []\n", 0), ended


def test_a_path_that_leads_up_is_found_while_others_rename(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    storm = "import os, sys\nos.chdir(sys.argv[1])\nos.mkdir('x')\nprint(flush=True)\n"
    storm += "while True:\n os.rename('x', 'y')\n os.rename('y', 'x')\n"
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    with subprocess.Popen([sys.executable, "-c", storm, str(tmp_path)], stdout=subprocess.PIPE) as renaming:
        try:
            assert renaming.stdout and renaming.stdout.readline()
            for _ in range(20_000):
                os.close(kernel.open_in(root, "folder/../folder/../file", os.O_RDONLY))
        finally:
            renaming.kill()
            os.close(root)
