"""Sources of tasks: what they hold, and what is said of a task that cannot be read or run here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.tasks import TaskSource, open_source
from support.paths import ROOT

HARBOR = ROOT / "tests" / "data" / "harbor"


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


def a_checkout(folder: Path, commit: str) -> Path:
    """A checkout with one task in it, as git leaves it."""
    shutil.copytree(HARBOR / "greeting", folder / "tasks" / "greeting")
    (folder / ".git/refs/heads").mkdir(parents=True)
    (folder / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".git/refs/heads/main").write_text(f"{commit}\n")
    return folder


def test_a_registry_gives_the_tasks_of_checkouts_beside_it(tmp_path: Path) -> None:
    commit, other = "ab" * 20, "cd" * 20
    a_checkout(tmp_path / "tasks-of-theirs", commit)
    shutil.copytree(HARBOR / "own-paths", tmp_path / "local" / "own-paths")
    url = "https://git.example/org/tasks-of-theirs.git"
    entry = {"name": "hello", "git_url": url, "git_commit_id": commit, "path": "tasks/greeting"}
    datasets = [
        {
            "name": "one",
            "version": "1.0",
            "description": "x",
            "tasks": [entry, {"name": "own", "path": "local/own-paths"}],
        },
        {
            "name": "two",
            "version": "2.0",
            "description": "x",
            "tasks": [
                {**entry, "git_commit_id": other},
                {**entry, "git_url": "https://git.example/org/absent.git"},
                {**entry, "path": "../.."},
                {**entry, "path": "tasks/none"},
            ],
        },
    ]
    path = tmp_path / "registry.json"
    path.write_text(json.dumps(datasets))
    found = list(open_source(path))
    assert [bool(task.file) for task in found] == [True, True, False, False, False, False]
    assert found[0].file and found[0].file.task.paths == "system" and found[0].where == f"{path}#one:hello"
    problems = " | ".join(task.problem for task in found)
    for words in (
        f"is at {commit[:12]}",
        f"git checkout {other}",
        "git clone https://git.example",
        "leads out of",
        "none",
    ):
        assert words in problems
    assert len(list(open_source(f"{path}#one"))) == len(list(open_source(f"{path}#one@1.0"))) == 2
    with pytest.raises(UsageError, match="no dataset 'three'"):
        open_source(f"{path}#three")
    path.write_text('[{"name": "x"}]')
    with pytest.raises(UsageError, match=r"registry.json: is no registry: tasks: Field required"):
        open_source(path)


MAPPING = """
rows = "data/*.jsonl"
[columns]
id = "uid"
instruction = "question"
"tests.expected.txt" = "answer"
[task]
verify = ['test "$(cat out.txt)" = "$(cat $TESTS_DIR/expected.txt)"']
"""


def test_columns_of_a_dataset_become_what_a_task_says(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = [
        {"uid": "a", "question": "2 + 2?", "answer": "4"},
        {"uid": "b", "question": "?", "answer": {"x": 1}},
        {"uid": "c"},
    ]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n[]")
    (tmp_path / "set.toml").write_text(MAPPING)
    found = list(open_source(tmp_path / "set.toml"))
    assert [(task.id, bool(task.file)) for task in found] == [
        ("a", True),
        ("b", True),
        ("train-3", False),
        ("train-4", False),
    ]
    assert (
        found[0].file
        and found[0].file.task.tests == {"expected.txt": "4"}
        and found[0].file.task.instruction == "2 + 2?"
    )
    assert "train.jsonl:3: there is no column 'question'" in found[2].problem and "uid" in found[2].problem
    assert "train.jsonl:4" in found[3].problem
    for text, words in (
        ("rows = 'none/*'", "no file matches 'none/"),
        ("rows = 'data/*'\nrow = 1", "set.toml: row: Extra"),
    ):
        (tmp_path / "set.toml").write_text(text)
        with pytest.raises(UsageError, match=words):
            open_source(tmp_path / "set.toml")


def test_a_dataset_that_was_saved_or_cloned_is_a_source(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": ["a", "b"], "instruction": ["x", "y"], "verify": [["true"], None]})
    (tmp_path / "cloned/data").mkdir(parents=True)
    parquet.write_table(table, tmp_path / "cloned/data/train-00000-of-00001.parquet")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/dataset_info.json").write_text("{}")
    with (
        arrow.OSFile(str(tmp_path / "saved/data-0.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    for source in ("cloned", "saved", "cloned/data/train-00000-of-00001.parquet"):
        found = list(open_source(tmp_path / source))
        assert [(task.id, task.verifier) for task in found] == [("a", "commands"), ("b", "none")], source
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match=r"bad\.parquet: cannot be read after row 0"):
        list(open_source(tmp_path / "bad.parquet"))
