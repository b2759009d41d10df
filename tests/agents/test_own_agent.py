"""A user's own agent, as docs/agents.md writes one: found by its file, run in a box; and one that asks no model."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from rollcage.agents.catalog import AgentCatalog, shipped
from rollcage.agents.cli_agent import Downloads, _object
from rollcage.agents.mini import Mini
from rollcage.agents.mini_swe_agent.agent import MiniSweAgent
from rollcage.conformance.agents import check
from rollcage.errors import UsageError
from rollcage.json_safe import TOO_DEEP
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import AgentSpec, Blame, Job, Outcome, Task

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"


@pytest.fixture
def own(tmp_path: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?class MyAgent.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "my_agent.py").write_text(code.rpartition("```python")[2])
    return f"{tmp_path / 'my_agent.py'}:MyAgent"


def catalog(tmp_path: Path, *, local: bool = True) -> AgentCatalog:
    return AgentCatalog([Mini()], Downloads(tmp_path), local=local)


async def test_the_agent_of_the_docs_holds_all_but_what_the_docs_say(own: str, tmp_path: Path, state_dir: Path) -> None:
    agent = catalog(tmp_path)[own]
    async with LocalProvider(state_dir) as provider:
        found = {verdict.name: verdict async for verdict in check(agent, provider, pace=30)}
    assert [name for name, verdict in found.items() if verdict.outcome == "failed"] == ["events.complete"], found


def test_a_file_is_loaded_for_those_only_who_could_run_it(own: str, tmp_path: Path) -> None:
    assert own in catalog(tmp_path)
    with pytest.raises(UsageError, match="over the network"):
        catalog(tmp_path, local=False)[own]


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "empty.py").write_text("class Nothing: pass")
    for name, words in {
        "missing.py:Agent": "there is no file",
        f"{tmp_path}/broken.py:Agent": "ZeroDivisionError",
        f"{tmp_path}/empty.py:Agent": "has no class 'Agent'",
        f"{tmp_path}/empty.py:Nothing": "is no agent: it has no name",
        "mini@2": "mini has one version, 1",
    }.items():
        with pytest.raises(UsageError, match=words):
            catalog(tmp_path)[name]


MUTE = """
from rollcage.agents.cli_agent import CliAgent, Command

class Mute(CliAgent):
    name, version, wire = "mute", "1", "chat"
    program = ["sh", "-c", "echo 'no key in $KEY, nothing to do' >&2; exit CODE"]

    def layers(self):
        return []

    def command(self, run):
        return Command([], {}, run.instruction)
"""


@pytest.mark.parametrize("code", [0, 3])
async def test_an_end_without_a_model_call_is_a_failure_with_its_last_words(
    code: int, tmp_path: Path, backends: Registry, store: Store, model: ScriptedModel
) -> None:
    """With any exit code: a program that this box cannot run must not count as a policy that earned nothing."""
    (tmp_path / "mute.py").write_text(MUTE.replace("CODE", str(code)))
    name = f"{tmp_path}/mute.py:Mute"
    registry = Registry(providers=backends.providers, agents=catalog(tmp_path), gateway=backends.gateway)
    async with Runner.open(store, registry) as runner:
        job = Job(
            task=Task(instruction="Work.", verify=("true",)), model=model.endpoint([]), agent=AgentSpec(name=name)
        )
        rollout = await runner.wait(await runner.start(job))
    assert (rollout.outcome, rollout.error_code) == (Outcome.AGENT_FAILED, "no_model_call")
    assert rollout.agent_exit_code == code
    assert rollout.error is not None
    assert "never called its model" in rollout.error and "no key in $KEY, nothing to do" in rollout.error
    assert (rollout.reward, rollout.blame) == (None, Blame.INFRASTRUCTURE)


def test_what_a_program_prints_is_an_event_only_where_it_can_be_kept() -> None:
    assert _object(b'{"a": "\xc3\xa4 \\u00e4 \\uD83D\\uDE00"}') == {"a": "ä ä \U0001f600"}
    assert _object(b'{"a": "half: \\ud83d"}') == {"a": "half: ?"}
    deep = b'{"a":' * 150 + b"1" + b"}" * 150
    assert TOO_DEEP in json.dumps(_object(deep))
    for line in (b"words", b"[1]", b'{"a": "\xed\xa0\x80"}', b"[" * 100_000):
        assert _object(line) is None


def test_another_version_of_a_shipped_agent_is_told_of_once_and_one_that_has_none_is_refused(tmp_path: Path) -> None:
    downloads, said = Downloads(tmp_path), list[str]()
    known = AgentCatalog(shipped(downloads), downloads, say=said.append)
    for name in ("opencode", "claude-code", "codex", "pi", "qwen-code"):
        other = known[f"{name}@9.9.9"]
        assert (other.name, other.version) == (name, "9.9.9")
        assert other.layers()[0].key != known[name].layers()[0].key
        assert known[f"{name}@9.9.9"] is other
        assert known[f"{name}@{known[name].version}"].layers()[0].key == known[name].layers()[0].key
    assert len(said) == 5 and all("9.9.9: no hash of this version is known" in line for line in said)
    with pytest.raises(UsageError, match=r"mini-swe-agent has one version, 2\.4\.6; name it: mini-swe-agent"):
        known["mini-swe-agent@2.4.5"]


def test_an_agent_in_python_says_what_its_box_lacks(tmp_path: Path) -> None:
    program = MiniSweAgent(Downloads(tmp_path)).program
    ended = subprocess.run(
        [f"/bin/{program[0]}", *program[1:]], env={"PATH": "/nowhere"}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (127, "")
    assert "needs python3, which this box lacks; choose an image that has it" in ended.stderr
