"""Task files: what a good one gives, and what is said about a bad one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollcage.errors import TaskError
from rollcage.tasks import load, load_task
from rollcage.types import Task
from support.commands import rollcage
from support.paths import EXAMPLES


def written(folder: Path, text: str, name: str = "task.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def complaints(path: Path) -> list[str]:
    with pytest.raises(TaskError) as caught:
        load(path)
    lines = str(caught.value).split("\n")
    assert all(line.startswith(str(path)) for line in lines), lines
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_every_field_of_a_task_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "blob").write_bytes(b"\xff\0")
    path = written(
        tmp_path,
        """
        id = "t1"
        instruction = "Do it."
        workdir = "/home/user/project"
        setup = ["true"]
        verify = ["test -e x"]
        test_script = "echo 1 > $REWARD_FILE"
        verify_in = "fresh"
        keep = ["/home/user/.cache"]
        restore = [".git"]
        isolate = true
        guards = false
        reward_from = "reward.txt"
        seal_tests = false
        paths = "home"
        verify_env = { A = "b" }
        solution_script = "touch x"
        solution_patch = ""
        verifier = "def verify(before, after): return 1"
        environment_seed = 7
        environment = "fleet:ticket-desk"
        [files]
        "a.txt" = "text"
        "data" = { from = "data" }
        [tests]
        "t.py" = "pass"
        [limits]
        agent_timeout_s = 5
        max_turns = 3
        [[check]]
        kind = "command"
        command = "test -e x"
        [[solution]]
        text = "I will."
        [[solution.tool_calls]]
        name = "bash"
        arguments = { command = "touch x", description = "Makes x" }
        """,
    )
    task = load_task(path)
    assert load(path).environment == "fleet:ticket-desk"
    of_folders = {"tests_tree", "more_tests", "solution_tree", "collect", "verifier_box", "steps", "step_reward"}
    of_folders |= {"agent_user", "verify_user", "mcp_servers"}
    assert set(Task.model_fields) - of_folders == task.model_fields_set
    assert (task.id, task.workdir, task.verify_in, task.limits.max_turns) == ("t1", "/home/user/project", "fresh", 3)
    assert task.solution[0].tool_calls[0].arguments == {"command": "touch x", "description": "Makes x"}


def test_tests_and_solutions_that_are_no_text_have_folders(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "blob").write_bytes(b"\xff\0")
    text = (
        'instruction = "x"\ntests_folder = "data"\nsolution_folder = "data"\nsolution_script = "cp ~/solution/blob ."\n'
    )
    text += """verify = ['cmp blob "$TESTS_DIR/blob"']\n"""
    path = written(tmp_path, text)
    task = load_task(path)
    assert task.tests_tree and task.tests_tree == task.solution_tree and task.tests_tree.files == 1
    tmp_path.chmod(0o755)
    for agent, reward in (("oracle", 1), ("nop", 0)):
        ended = rollcage(tmp_path, "run", str(path), "--agent", agent, "--json", env={"ROLLCAGE_SYSTEM": "host"})
        assert json.loads(ended.stdout)["reward"] == reward, ended.stderr
    for wrong, words in (
        ('"/etc"', "leads out of"),
        ('"nope"', "is no folder"),
        ("7", "must be the name"),
        ('"."', "holds the task itself"),
    ):
        with pytest.raises(TaskError, match=f"tests_folder: .*{words}"):
            load_task(written(tmp_path, f'instruction = "x"\ntests_folder = {wrong}\n'))
    with pytest.raises(TaskError, match=r"tests.b: .* is not UTF-8 text .*tests_folder"):
        load_task(written(tmp_path, 'instruction = "x"\n[tests]\nb = { from = "data/blob" }\n'))


def test_the_tables_beside_the_task(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        instruction = "x"
        mode = "black_box"
        [agent]
        system_prompt = "Be brief."
        [sandbox]
        pids = 32
        [endpoint]
        endpoint = "vllm"
        base_url = "http://h"
        temperature = 0.2
        """,
    )
    file = load(path)
    assert (file.agent.system_prompt, file.sandbox.pids, file.mode) == ("Be brief.", 32, "black_box")
    assert (file.endpoint.endpoint, file.endpoint.temperature) == ("vllm", 0.2)
    assert file.task.id == "task"


@pytest.mark.parametrize("line", ['endpoint = "openai"', 'model = "openai"', '[model]\nendpoint = "openai"'])
def test_an_endpoint_can_be_named_in_one_word(tmp_path: Path, line: str) -> None:
    assert load(written(tmp_path, f'instruction = "x"\n{line}')).endpoint.endpoint == "openai"


def test_a_json_file_says_the_same(tmp_path: Path) -> None:
    data = {"instruction": "x", "files": {"a": "b"}, "limits": {"timeout_s": 9}}
    task = load_task(written(tmp_path, json.dumps(data), "task.json"))
    assert (task.files, task.limits.timeout_s) == ({"a": "b"}, 9)


def test_text_can_come_from_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    written(tmp_path, "Do this.\n", "prompt.md")
    written(tmp_path / "sub", "print(1)\n", "a.py")
    path = written(
        tmp_path,
        'instruction_file = "prompt.md"\ntest_script_file = "sub/a.py"\n[files]\n"b.py" = { from = "sub/a.py" }',
    )
    task = load_task(path)
    assert (task.instruction, task.test_script, task.files) == ("Do this.\n", "print(1)\n", {"b.py": "print(1)\n"})


@pytest.mark.parametrize(
    ("line", "key", "near"),
    [
        ('instrution = "x"', "instrution", "instruction"),
        ("[limit]\nmax_turns = 1", "limit", "limits"),
        ("[limits]\nagent_timeout = 1", "limits.agent_timeout", "agent_timeout_s"),
        ("[sandbox]\nmemory = 1", "sandbox.memory", "memory_mb"),
        ('[agent]\nsystem_promt = "x"', "agent.system_promt", "system_prompt"),
        ('[endpoint]\nbase_urll = "x"', "endpoint.base_urll", "base_url"),
        ('[[solution]]\ntxt = "x"', "solution.0.txt", "text"),
        ('[[solution]]\n[[solution.tool_calls]]\nname = "a"\nargs = 1', "solution.0.tool_calls.0.args", "arguments"),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant(tmp_path: Path, line: str, key: str, near: str) -> None:
    [said] = complaints(written(tmp_path, f'instruction = "x"\n{line}'))
    assert f"unknown key {key!r}" in said
    if near != "arguments":
        assert f"did you mean {near!r}?" in said
    else:
        assert near in said


def test_each_problem_has_a_line_of_its_own(tmp_path: Path) -> None:
    said = complaints(
        written(
            tmp_path,
            """
            instruction = "  "
            setup = "one"
            verify = [1]
            verify_in = "elsewhere"
            workdir = "/etc"
            colour = "red"
            [files]
            "a" = 3
            [limits]
            agent_timeout_s = -1
            max_turns = "many"
            """,
        )
    )
    found = {line.split(":")[0] for line in said}
    fields = {"instruction", "setup", "verify.0", "verify_in", "workdir", "files.a", "limits.agent_timeout_s"}
    assert fields | {"limits.max_turns"} <= found
    assert any("'colour'" in line for line in said)
    assert "setup: must be a list (is 'one')" in said
    assert "verify.0: must be text (is 1)" in said


def test_a_file_without_an_instruction_is_told_so_once(tmp_path: Path) -> None:
    [said] = complaints(written(tmp_path, "setup = []"))
    assert "instruction: is missing" in said and "instruction_file" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("instruction = \nsetup = []", "line 1"),
        ('instruction = "x"\ninstruction = "y"\nsetup = []', "line 2"),
        ("a" * 40, "no valid TOML"),
        ('instruction = "x"\n[limits]\nagent_timeout_s = inf', "limits.agent_timeout_s: inf is no usable number"),
        ('instruction = "x"\n[limits]\nagent_timeout_s = nan', "limits.agent_timeout_s: nan is no usable number"),
        ('instruction = "x"\n[endpoint]\n[endpoint.extra_body]\nday = 2020-01-01', "endpoint.extra_body.day"),
        ('instruction = "x"\ninstruction_file = "y"', "keep one of the two"),
        ("instruction_file = 3", "must be the name of a file"),
        ('instruction_file = "gone.md"', "'gone.md': no such file"),
        ('instruction = "x"\nendpoint = "vllm"\nmodel = "openai"', "keep one of them"),
        ('instruction = "x"\n[files]\n"a" = { from = 3 }', "files.a: must be text or"),
        ('instruction = "x"\n[files]\n"a" = { text = "y" }', "files.a: must be text or"),
        ('instruction = "x"\n[files]\n"../a" = "y"', "files.../a"),
        ('instruction = "x"\n[files]\n"/etc/passwd" = "y"', "/etc/passwd"),
        ('instruction = "x"\n[files]\n"a" = { from = "." }', "is a folder"),
    ],
)
def test_what_else_can_be_wrong_is_said_plainly(tmp_path: Path, text: str, words: str) -> None:
    assert any(words in line for line in complaints(written(tmp_path, text)))


@pytest.mark.parametrize("text", ["{", "[]", '{"instruction": "x", "instruction": "y"}', "[" * 100_000])
def test_bad_json_is_said_plainly(tmp_path: Path, text: str) -> None:
    assert complaints(written(tmp_path, text, "task.json"))


def test_a_key_in_a_task_file_is_refused_without_repeating_it(tmp_path: Path) -> None:
    path = written(tmp_path, 'instruction = "x"\n[endpoint]\nendpoint = "openai"\napi_key = "sk-hidden"')
    [said] = complaints(path)
    assert "OPENAI_API_KEY" in said and "sk-hidden" not in said


@pytest.mark.parametrize("where", ["../secret", "/etc/hostname", "link"])
def test_nothing_outside_the_tasks_folder_can_be_brought_along(tmp_path: Path, where: str) -> None:
    folder = tmp_path / "task"
    folder.mkdir()
    (tmp_path / "secret").write_text("hidden")
    (folder / "link").symlink_to(tmp_path / "secret")
    [said] = complaints(written(folder, f'instruction = "x"\n[files]\n"a" = {{ from = "{where}" }}'))
    assert "leads out of the task's folder" in said and "hidden" not in said


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    [said] = complaints(written(tmp_path, 'instruction = "x"\n[files]\n"a" = { from = "picture.png" }'))
    assert "is not UTF-8 text" in said


def test_a_pipe_does_not_hang_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "task.toml")
    [said] = complaints(tmp_path / "task.toml")
    assert "is not a regular file" in said


def test_a_missing_file_is_answered_with_one_that_is_there(tmp_path: Path) -> None:
    written(tmp_path, 'instruction = "x"', "paginate.toml")
    [said] = complaints(tmp_path / "paginat.toml")
    assert "no such file; did you mean" in said and "paginate.toml" in said


def test_another_ending_is_refused(tmp_path: Path) -> None:
    [said] = complaints(written(tmp_path, "x", "task.yaml"))
    assert ".toml or .json" in said


@pytest.mark.parametrize("name", ["paginate", "wordcount", "merge"])
def test_each_example_can_be_read_and_brings_a_solution(name: str) -> None:
    task = load_task(EXAMPLES / f"{name}.toml")
    assert task.id == name and task.solution and (task.verify or task.test_script or task.checks)
