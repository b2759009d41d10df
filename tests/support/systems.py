"""A small root file system made of programs of this machine: what `docker export` would give, without Docker."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PROGRAMS = (
    "bash env sh mkdir rm chmod cat find tar ls sleep true false cp mv touch readlink head tail id echo ln wc sort tr "
    "uname sha256sum truncate stat pwd dd seq df du yes timeout cmp grep sed mktemp date nproc mkfifo printenv "
    "base64 tee"
).split()
PYTHON = "/usr/bin/python3"
GLIBC = ("libpthread.so.0", "libdl.so.2", "libm.so.6", "librt.so.1", "libresolv.so.2")
"""What comes with every C library, whether or not a program of ours asks for it; agents do."""
MARK = "a system of its own"


def a_system(folder: Path, *, python: bool = False) -> Path:
    """Fill a folder with a system: bash, coreutils, find, tar, and Python where asked."""
    for name in ("usr/bin", "usr/lib", "etc", "root", "var/lib", "tmp", "opt", "testbed"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    (folder / "usr/lib64").mkdir()
    (folder / "etc/os-release").write_text(f'PRETTY_NAME="{MARK}"\n')
    (folder / "etc/shadow").write_text("root:secret\n")
    (folder / "root/.profile").write_text("")
    for name in PROGRAMS:
        _add(folder, f"/usr/bin/{name}")
    if python:
        _add(folder, PYTHON)
        told = subprocess.run(
            [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"], capture_output=True
        )
        library = Path(told.stdout.decode().strip())
        left_out = shutil.ignore_patterns(
            "test", "__pycache__", "idlelib", "ensurepip", "lib2to3", "config-*", "pydoc_data"
        )
        shutil.copytree(library, folder / str(library).lstrip("/"), ignore=left_out, symlinks=False)
        for module in library.glob("lib-dynload/*.so"):
            _add_libraries(folder, str(module))
    return folder


def _add(folder: Path, program: str) -> None:
    found = Path(program) if Path(program).exists() else Path(shutil.which(Path(program).name) or program)
    target = folder / program.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(found, target)
    _add_libraries(folder, str(found))


def _add_libraries(folder: Path, program: str) -> None:
    told = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    for word in told.split():
        if word.startswith("/") and os.path.exists(word):
            beside = [str(Path(word).with_name(name)) for name in GLIBC] if "/libc.so" in word else []
            for library in (word, *beside):
                target = folder / library.lstrip("/")
                if os.path.exists(library) and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(library, target)
