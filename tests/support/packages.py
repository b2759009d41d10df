"""What tests need of a machine beside Python: installed by name in CI; elsewhere no test changes anybody's machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.paths import SCRIPTS


def install(*programs: str) -> None:
    """In CI, the programs that are missing."""
    _run_in_ci("container.sh", *programs)


def need_compiler(program: str, package: str) -> None:
    """Skip where it is not among the system's own programs, which boxes see, and cannot be had."""
    if not Path("/usr/bin", program).exists() and os.geteuid() == 0:
        _run_in_ci("apt.sh", os.devnull, package)
    if not Path("/usr/bin", program).exists():
        pytest.skip(f"this machine has no /usr/bin/{program}; apt-get install {package}")


def _run_in_ci(script: str, *arguments: str) -> None:
    if os.environ.get("CI") in ("true", "1"):
        done = subprocess.run([SCRIPTS / script, *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(done.stderr.strip() or f"scripts/{script} failed")
