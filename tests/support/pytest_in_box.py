"""A real pytest in a box whose system has none: its files, which are plain Python, in a virtual environment."""

from __future__ import annotations

import base64
import io
import tarfile
from functools import cache
from importlib import metadata
from pathlib import PurePath

VENV = "/home/user/venv"
PYTHON = f"{VENV}/bin/python"
SETUP = f"python3 -m venv --without-pip {VENV} && base64 -d ~/pytest | tar xz -C {VENV}/lib/python3*/site-packages"
"""A task's setup; `pytest_files()` are to be among its files."""

_PYGMENTS = "__init__ _mapping python diff terminal default _colors _ansi"


@cache
def pytest_files() -> dict[str, str]:
    """For a task's `files`: pytest and what it needs, packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            distribution = metadata.distribution(name)
            for path in distribution.files or ():
                if path.suffix == ".py" and ".." not in path.parts and _needed(path):
                    tar.add(str(distribution.locate_file(path)), str(path))
    return {"/home/user/pytest": base64.encodebytes(packed.getvalue()).decode()}


def _needed(path: PurePath) -> bool:
    """Not the hundreds of languages that it could colour."""
    return path.parts[0] != "pygments" or len(path.parts) < 3 or path.stem in _PYGMENTS.split()
