"""What README and docs show is true: every block of code on every page runs, or says why it cannot run here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.page import RUN, blocks, run, unmarked_commands

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples" / "README.md"])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TO_RUN = [
    name
    for page, name in zip(PAGES, NAMES, strict=True)
    if any(block.language in RUN and not block.reason for block in blocks(page.read_text()))
]


def test_the_pages_are_found() -> None:
    assert {"README.md", "docs/python.md", "docs/tasks.md"} <= set(TO_RUN)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_with_commands_says_what_it_is(name: str) -> None:
    """Then it is run, or carries its reason; blocks without a language are pictures and output."""
    assert unmarked_commands((ROOT / name).read_text()) == [], "lines of blocks that need a language"


@pytest.mark.parametrize("name", TO_RUN)
def test_every_block_of_a_page_runs(name: str, state_dir: Path, tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir()
    for shared in ("cache", "layers"):
        (state_dir / shared).mkdir(parents=True, exist_ok=True)
        (home / shared).symlink_to(state_dir / shared)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}",
        "HOME": str(tmp_path),
        "ROLLCAGE_HOME": str(home),
    }
    command = [sys.executable, "-m", "support.page", str(ROOT / name)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stdout[-6000:]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```python\nassert False, 'no'\n```", "page.md:1 does not run: no"),
        ("\n```sh\nexit 3\n```", "page.md:2 does not run: exit code 3"),
        ("```console\n$ false\nits output\n```", "exit code 1"),
        ('```toml\ninstrution = "x"\n```', "did you mean 'instruction'"),
        ("```python\nimport asyncio\nawait asyncio.sleep(0)\nawait nothing()\n```", "'nothing' is not defined"),
        ("<!-- run first: python\nsaid = 1\n-->\n```python\nassert said == 2, said\n```", "does not run: 1"),
        ("<!-- not run: a reason -->\nwords\n\n```python\n1 / 0\n```", "division by zero"),
    ],
)
def test_a_block_that_does_not_run_is_told_by_its_line(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(RuntimeError, match=says):
        run(page)
    page.write_text(f"<!-- not run: it is wrong -->\n{text[text.index('```') :]}")
    run(page)
