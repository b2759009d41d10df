"""Sources of tasks: what they hold, and what is said of a task that cannot be read or run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.tasks import TaskSource, open_source
from support.paths import ROOT


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def nothing(name: str) -> bool:
    return False


def test_a_folder_gives_every_task_file_in_it() -> None:
    source: TaskSource = open_source(ROOT / "examples")
    found = list(source)
    assert [task.id for task in found] == ["merge", "paginate", "wordcount"]
    assert all(task.file and task.verifier != "none" and not task.why_not(nothing) for task in found)
    assert [task.digest for task in found] == [task.digest for task in source]


def test_the_digest_is_of_what_the_task_says_and_not_of_where_it_lies(tmp_path: Path) -> None:
    one = written(tmp_path / "a.json", {"id": "x", "instruction": "Do it."})
    other = written(tmp_path / "b.json", {"instruction": "Do it.", "id": "x"})
    third = written(tmp_path / "c.json", {"id": "x", "instruction": "Do it!"})
    digests = [next(iter(open_source(path))).digest for path in (one, other, third)]
    assert digests[0] == digests[1] != digests[2]


def test_a_broken_line_breaks_no_other_and_names_itself(tmp_path: Path) -> None:
    good = {"id": "good", "instruction": "Do it.", "verify": ["true"]}
    lines = written(tmp_path / "set.jsonl", good, "{", {"instrution": "x"}, "", [1], {"instruction": "Two."}, good)
    found = list(open_source(lines))
    assert [task.id for task in found] == ["good", "set-2", "set-3", "set-5", "set-6", "good#2"]
    assert [bool(task.problem) for task in found] == [False, True, True, True, False, False]
    assert f"{lines}:2: is no valid JSON" in found[1].problem and "did you mean 'instruction'" in found[2].problem
    assert found[1].why_not(nothing) == found[1].problem and found[0].verifier == "commands"


def test_a_task_whose_image_is_not_there_says_so(tmp_path: Path) -> None:
    task = {"instruction": "Do it.", "sandbox": {"template": "science"}}
    [found] = open_source(written(tmp_path / "set.jsonl", task))
    assert "science" in found.why_not(nothing) and not found.why_not(lambda name: name == "science")


@pytest.mark.parametrize("name", ["missing", "missing.jsonl", "empty"])
def test_what_is_no_source_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=name):
        open_source(tmp_path / name)
