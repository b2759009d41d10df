"""Python run by a user who has no right to anything of the machine's, where the tests are root's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_UID = "61235"
_USER = ("setpriv", "--reuid", _UID, "--regid", _UID, "--clear-groups")


@contextmanager
def ordinary_user(needs: str) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """A command that runs Python as such a user, its environment, and its home. `needs`: a module it must be able to
    import. Skips where the tests are no root's, or no Python is to be had."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("everything here is done by an ordinary user, or none can be had")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    # The interpreter of these tests may lie where only root may go.
    probe = f"import os, sys, {needs}; sys.exit(not os.access(sys.executable, os.X_OK))"
    for python in (str(Path(sys.executable).resolve()), "/usr/bin/python3"):
        if subprocess.run([*_USER, python, "-c", probe], env=env, capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("another user can run no Python that has what rollcage needs")
    # Not in pytest's own folder: other users may not enter that.
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, int(_UID), int(_UID))
        yield [*_USER, python], {**env, "HOME": home}, Path(home)
