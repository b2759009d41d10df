"""The environment with TRL and verl in it, as scripts/trainers.sh builds it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.paths import ROOT, SCRIPTS, TESTS

INSTALL_S = 15 * 60
FOLDER = "trainers-1"


class NotBuilt(Exception):
    """There are no trainers here; the message says why."""


def build(cache: Path) -> Path:
    """Its Python. Raises NotBuilt."""
    folder = cache / FOLDER
    argv = ["timeout", "--kill-after=10", str(INSTALL_S), str(SCRIPTS / "trainers.sh"), str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotBuilt(said[-1] if said else f"scripts/trainers.sh ended with exit code {done.returncode}")
    return folder / "venv" / "bin" / "python"


def checked(python: Path, name: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the checks of a file there: rollcage comes from the source, and what it keeps goes to `home`."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{TESTS}",
        "ROLLCAGE_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    argv = [str(python), "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", str(TESTS / "trainers")]
    argv += ["-p", "no:cacheprovider", str(TESTS / "trainers" / name)]
    # A folder called `vllm` in the working folder would break TRL's import.
    return subprocess.run(argv, env=environment, cwd=home, capture_output=True, text=True, check=False)
