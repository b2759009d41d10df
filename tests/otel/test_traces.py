"""Rollouts as OpenTelemetry traces: real rollouts, sent to a real collector that decodes them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from rollcage.errors import UsageError
from rollcage.events import Ended, Queued, StageStarted
from rollcage.otel import sender
from rollcage.otel.sender import checked_address, sending
from rollcage.runner import Runner
from rollcage.settings import OtlpSettings, Settings
from rollcage.store import Store
from rollcage.types import NO_MODEL, Job, Outcome, ScriptedCall, ScriptedTurn, Stage, Task
from rollcage.wiring import opened_runner
from support.commands import environ, rollcage
from support.otlp_collector import Collector, attributes, collecting
from support.playing import Play
from support.served import served


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),))


SCRIPT = (bash("echo mellon > word.txt; cat word.txt"), bash("exit 3"), ScriptedTurn(text="Speak friend."))
TASK = Task(id="door", instruction="Say mellon.", setup=("echo prepared",), verify=("test -e word.txt", "false"))
SAID = ("mellon", "Speak friend", "echo prepared", "test -e word.txt")


def by_name(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


async def test_a_rollout_is_a_trace_of_stages_turns_and_tools(
    collector: Collector, play: Play, runner: Runner, store: Store
) -> None:
    async with sending(store, OtlpSettings(url=collector.url), print) as runner.on_event:
        rollout = await play(TASK, agent="mini", script=SCRIPT)
    assert list(collector.traces()) == [rollout.id * 2]
    spans = collector.spans
    ids = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if not span.parent_span_id]
    assert root.name == "rollout door" and len(ids) == len(spans)
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span is root or span.parent_span_id in ids
    stages = [span.name for span in spans if span.parent_span_id == root.span_id]
    assert stages == ["queued", "provision", "setup", "invoke_agent mini", "verify"]
    found = attributes(root)
    assert found["rollcage.rollout.id"] == rollout.id and found["rollcage.outcome"] == "finished"
    assert (found["rollcage.reward"], rollout.reward, root.status.code) == (0.5, 0.5, root.status.STATUS_CODE_UNSET)
    scores = [attributes(event) for event in root.events if event.name == "gen_ai.evaluation.result"]
    assert scores[0] == {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.5}
    (agent,) = by_name(spans, "invoke_agent mini")
    chats = by_name(spans, f"chat {rollout.job.model.model}")
    assert [attributes(chat)["rollcage.turn"] for chat in chats] == [1, 2, 3]
    for chat, turn in zip(chats, rollout.turns, strict=True):
        told = attributes(chat)
        assert chat.kind == chat.SPAN_KIND_CLIENT and chat.parent_span_id == agent.span_id
        assert (told["gen_ai.operation.name"], told["gen_ai.provider.name"]) == ("chat", "scripted")
        assert told["gen_ai.usage.output_tokens"] == len(turn.tokens)
        assert told["gen_ai.usage.input_tokens"] == len(turn.prompt_ids)
        assert told["gen_ai.response.finish_reasons"] == [turn.finish_reason]
    first, second = by_name(spans, "execute_tool bash")
    assert first.parent_span_id == agent.span_id and attributes(first)["gen_ai.tool.name"] == "bash"
    assert (attributes(first)["rollcage.tool.exit_code"], attributes(second)["rollcage.tool.exit_code"]) == (0, 3)
    passed, failed = by_name(spans, "verify command")
    assert passed.status.code == 0 and failed.status.code == failed.status.STATUS_CODE_ERROR
    assert attributes(failed)["error.type"] == "exit_code"
    assert collector.resources[0]["service.name"] == "rollcage"
    assert not [words for words in SAID if words.encode() in b"".join(collector.bodies)], "contents are not sent"


async def test_contents_are_sent_where_they_are_asked_for(
    collector: Collector, play: Play, runner: Runner, store: Store
) -> None:
    async with sending(store, OtlpSettings(url=collector.url, content=True), print) as runner.on_event:
        rollout = await play(TASK, agent="mini", script=SCRIPT)
    assert not [words for words in SAID if words.encode() not in b"".join(collector.bodies)]
    sent = {name for span in collector.spans for of in (span, *span.events) for name in attributes(of)}
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    assert len(sent & known) > 15 and not [name for name in sent - known if name.startswith("gen_ai.")]
    last = attributes(by_name(collector.spans, f"chat {rollout.job.model.model}")[-1])
    asked = json.loads(last["gen_ai.input.messages"])
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "assistant", "tool"]
    assert asked[1]["parts"][0]["name"] == "bash" and "mellon" in asked[2]["parts"][0]["response"]
    (answer,) = json.loads(last["gen_ai.output.messages"])
    assert answer["parts"] == [{"type": "text", "content": "Speak friend."}] and answer["finish_reason"] == "stop"
    assert json.loads(last["gen_ai.system_instructions"])[0]["type"] == "text"
    tool = attributes(by_name(collector.spans, "execute_tool bash")[0])
    assert "mellon" in tool["gen_ai.tool.call.result"] and "command" in json.loads(tool["gen_ai.tool.call.arguments"])


JOB = Job(task=Task(id="t", instruction="x"), model=NO_MODEL)


async def ended(store: Store, name: str) -> tuple[str, Ended]:
    """A rollout that was queued and is over."""
    over = Ended(outcome=Outcome.ABORTED, error="aborted: by hand", error_code="aborted")
    await store.append(name, Queued(job=JOB))
    await store.append(name, over)
    return name, over


async def arrived(collector: Collector) -> None:
    await anyio.to_thread.run_sync(collector.arrived.acquire)


async def test_a_slow_collector_holds_up_nobody_and_what_finds_no_room_is_said(
    collector: Collector, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MOST_WAITING", 2)
    said: list[str] = []
    collector.open.clear()
    async with sending(store, OtlpSettings(url=collector.url), said.append) as on_event:
        on_event(*await ended(store, "r0"))
        await arrived(collector)
        for number in range(1, 5):
            on_event(*await ended(store, f"r{number}"))
        assert not collector.spans, "all five have ended, and the collector has answered nothing"
        collector.open.set()
    assert len(collector.traces()) == 3
    assert said == [f"2 of 5 traces were not sent to {collector.url}; the log has the rollouts"]


async def test_a_collector_that_comes_back_gets_what_it_missed(
    collector: Collector, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "REQUEST_S", 0.5)
    monkeypatch.setattr(sender, "PAUSES_S", (0.01,))
    collector.statuses += [503] * 3
    said: list[str] = []
    async with sending(store, OtlpSettings(url=collector.url), said.append) as on_event:
        for number in range(3):
            on_event(*await ended(store, f"r{number}"))
        for _ in range(6):
            await arrived(collector)
    assert len(collector.traces()) == 3 and said == [
        f"the collector at {collector.url} took no traces (HTTP 503); rollouts go on"
    ]


async def test_a_trace_that_is_refused_is_not_tried_again(collector: Collector, store: Store) -> None:
    collector.statuses += [400, 302]
    said: list[str] = []
    async with sending(store, OtlpSettings(url=collector.url), said.append) as on_event:
        on_event(*await ended(store, "r0"))
        on_event(*await ended(store, "r1"))
        on_event(*await ended(store, "r2"))
    assert len(collector.traces()) == 1 and len(collector.headers) == 3
    assert "(HTTP 400)" in said[0] and said[1].startswith("2 of 3 traces were not sent")


async def test_the_end_does_not_wait_for_a_collector_that_never_answers(
    collector: Collector, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "FLUSH_S", 0.1)
    monkeypatch.setattr(sender, "REQUEST_S", 100_000)
    said: list[str] = []
    collector.open.clear()
    with anyio.CancelScope() as scope:
        async with sending(store, OtlpSettings(url=collector.url), said.append) as on_event:
            on_event(*await ended(store, "r0"))
            await arrived(collector)
            scope.cancel()
    assert said[-1].startswith("1 of 1 traces were not sent")
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "rollcage-otlp"] == [True]


async def test_what_a_dead_process_left_open_is_a_trace_too(collector: Collector, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "state", otlp=OtlpSettings(url=collector.url))
    async with Store.open(settings.log_path) as store:
        await store.append("theirs", Queued(job=JOB, owner="nobody"))
        await store.append("theirs", StageStarted(stage=Stage.SETUP))
        async with opened_runner(settings, store):
            pass
    root, queued, setup = collector.spans
    assert attributes(root)["error.type"] == attributes(setup)["error.type"] == "crashed"
    assert (queued.name, setup.name, attributes(root)["rollcage.blame"]) == ("queued", "setup", "infrastructure")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    for name in ("one", "two"):
        (tmp_path / "tasks" / f"{name}.toml").write_text('instruction = "touch a"\nverify = ["test -e a"]\n')
    return tmp_path


EVAL = ["eval", "tasks", "-m", "scripted", "--agent", "shell", "--name", "traced"]


def test_eval_sends_every_rollout_with_the_headers_that_are_set(home: Path, collector: Collector) -> None:
    env = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20opensesame,x-team=a"}
    ran = rollcage(home, *EVAL, "-n", "2", "--otlp", f"{collector.url}/", env=env)
    assert ran.returncode == 0 and "opensesame" not in ran.stdout + ran.stderr
    roots = [attributes(span) for span in collector.spans if not span.parent_span_id]
    assert sorted((root["rollcage.task.id"], root["rollcage.batch.sample"]) for root in roots) == [
        *(("one", 1), ("one", 2), ("two", 1), ("two", 2))
    ]
    assert {root["rollcage.batch.name"] for root in roots} == {"traced"}
    assert {(each["authorization"], each["x-team"]) for each in collector.headers} == {("Bearer opensesame", "a")}


def test_a_dead_collector_costs_no_rollout(home: Path) -> None:
    ran = rollcage(home, *EVAL, env={"ROLLCAGE_OTLP": "http://127.0.0.1:9"})
    assert ran.returncode == 0 and "2 done" in ran.stdout, ran.stdout + ran.stderr
    assert "2 of 2 traces were not sent to http://127.0.0.1:9" in ran.stderr


async def test_a_server_sends_traces_and_all_of_them_before_it_is_gone(tmp_path: Path, collector: Collector) -> None:
    async with served(tmp_path, "--otlp", collector.url) as server, server.client() as client:
        started = await client.start(instruction="touch a", agent="shell", endpoint="scripted", verify=["test -e a"])
        await client.wait(started.rollout_id)
        server.process.terminate()
        await server.ended()
    assert list(collector.traces()) == [started.rollout_id * 2]


def test_what_is_wrong_is_said_before_anything_is_started(home: Path) -> None:
    for url, words in (("collector:4318", "is no address"), ("http://me:secret@host", "credentials")):
        ran = rollcage(home, *EVAL, "--otlp", url)
        assert ran.returncode == 2 and words in ran.stderr and "secret" not in ran.stderr, ran.stderr
    code = "import sys; sys.modules['opentelemetry.sdk'] = None\nfrom rollcage.cli import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, *EVAL, "--otlp", "http://host:4318"]
    ran = subprocess.run(command, env=environ(home), cwd=home, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 3 and "pip install 'rollcage[otel]'" in ran.stderr, ran.stderr
    assert "no batches yet" in rollcage(home, "report").stdout


def test_addresses_are_bases_or_whole() -> None:
    for url in ("http://h:4318", "http://h:4318/", "http://h:4318/v1/traces"):
        assert checked_address(url) == ("http://h:4318", "http://h:4318/v1/traces")
    assert checked_address("https://h/otel?key=k") == ("https://h/otel", "https://h/otel/v1/traces?key=k")
    with pytest.raises(UsageError):
        checked_address("http://h:99999")


def test_a_file_beside_the_user_sets_no_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("ROLLCAGE_OTLP=http://evil\nROLLCAGE_OTLP_CONTENT=1\n")
    assert Settings.from_environ().otlp == OtlpSettings()
    monkeypatch.setenv("ROLLCAGE_OTLP", "http://mine")
    assert Settings.from_environ().otlp.url == "http://mine" and not Settings.from_environ().otlp.content
