"""The installed TRL and verl eat what rollcage gives them: each file of checks runs in their environment.

Skipped only where they cannot be installed; the reason is told.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainers import INSTALL_S, NotBuilt, build, checked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_S + 1800)]


@pytest.mark.parametrize("name", ["check_trl.py", "check_verl.py"])
def test_the_trainer_takes_real_rollouts(name: str, state_dir: Path, tmp_path: Path) -> None:
    try:
        python = build(state_dir / "cache")
    except NotBuilt as reason:
        pytest.skip(f"no trainers here: {reason}")
    for shared in ("cache", "layers"):
        (state_dir / shared).mkdir(parents=True, exist_ok=True)
        (tmp_path / shared).symlink_to(state_dir / shared)
    done = checked(python, name, tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
