"""What is told while an agent is fetched."""

from __future__ import annotations

import threading
from pathlib import Path

from rollcage.cli.prepare import _largest


def test_drafts_that_vanish_while_they_are_counted_disturb_nobody(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"x" * 900)
    before, done = frozenset(("kept",)), threading.Event()

    def come_and_go() -> None:
        draft = tmp_path / "draft" / "cache"
        while not done.is_set():
            draft.mkdir(parents=True)
            (draft / "file").write_bytes(b"x" * 500)
            (draft / "file").unlink()
            draft.rmdir()
            draft.parent.rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(3000):
            _largest(tmp_path, before)
    finally:
        done.set()
        thread.join()


def test_only_what_is_new_is_counted(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"x" * 900)
    (tmp_path / "draft" / "cache").mkdir(parents=True)
    (tmp_path / "draft" / "cache" / "file").write_bytes(b"x" * 500)
    assert _largest(tmp_path, frozenset(("kept",))) == 500
