"""The harness primitive: code written for the published environment, on our boxes and our gateway. All sync."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from openenv.core.harness import (
    LoopOwningSession,
    MCPHarnessAdapter,
    ModelStepResult,
    TrainableSession,
    VerifyResult,
    build_harness_rollout_func,
)
from openenv.core.llm_client import LLMResponse

import opencode_env
from opencode_env import (
    LocalSandboxBackend,
    OpenCodeConfig,
    OpenCodeHarnessAdapter,
    OpenCodeSession,
    OpenCodeSessionFactory,
    OpenCodeTask,
    RolloutSummary,
    SandboxBackend,
    SandboxHandle,
    collect_rollout_summary,
    print_rollout_summary,
)
from opencode_env.sandbox import BgJob, E2BSandboxBackend
from opencode_env.server import opencode_environment as published
from rollcage.errors import ModelUnreachable, SandboxError, UsageError
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.simulators import ScriptedModel
from rollcage.types import JsonObject, ScriptedCall, ScriptedTurn

WORKDIR = "/home/user/workdir"


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command, "description": "work"}),))


SCRIPT = (bash("cat seed.txt; echo hello > hello.txt"), ScriptedTurn(text="Done."))
HANGS = (ScriptedTurn(text="word " * 2000, token_delay_s=0.05),)
TASK = {
    "instruction": "Write hello.",
    "setup_shell": "echo seeded > seed.txt",
    "upload_files": {f"{WORKDIR}/given.txt": "given\n"},
    "metadata": {"answer": "hello\n"},
}


def verifier(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
    right = sandbox.read_text(f"{WORKDIR}/hello.txt") == task.metadata["answer"]
    return VerifyResult(env_reward=float(right), done=True, metrics={"right": right})


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(ScriptedModel()) as scripted:
        assert isinstance(portal, BlockingPortal)
        yield scripted


@pytest.fixture(scope="module")
def backend(state_dir: Path) -> LocalSandboxBackend:
    return LocalSandboxBackend(state_dir=state_dir)


Make = Callable[..., OpenCodeSessionFactory]


@pytest.fixture
def factory(model: ScriptedModel, backend: LocalSandboxBackend) -> Make:
    def make(script: tuple[ScriptedTurn, ...] = SCRIPT, **more: object) -> OpenCodeSessionFactory:
        endpoint = model.endpoint(script)
        config = {"agent_timeout_s": 300.0, **more.pop("config", {})}  # type: ignore[dict-item]
        return OpenCodeSessionFactory(
            config=OpenCodeConfig(
                base_url=endpoint.base_url,
                api_key=endpoint.key.get_secret_value(),
                model=f"intercepted/{endpoint.model}",
                **config,
            ),
            **{"sandbox_backend": backend, "mode": "transparent_proxy", "verifier": verifier, **more},  # type: ignore[arg-type]
        )

    return make


@pytest.mark.parametrize("driver", ["cli", "serve"])
def test_the_published_session_loop_runs_unchanged(driver: str, factory: Make) -> None:
    session = factory(driver=driver).create(TASK, seed=7, episode_id="e1")
    try:
        assert isinstance(session, LoopOwningSession)
        assert isinstance(session, TrainableSession)
        assert session.initial_messages() == [{"role": "user", "content": "Write hello."}]
        assert session.list_tools() == []
        assert session.call_tool("bash", {}).error
        assert session.wait_for_completion(timeout_s=300) == 0
        result = session.verify(transcript=[])
        assert (result.env_reward, result.metrics) == (1.0, {"right": True})
        entries = session.fetch_proxy_trace()
        assert len(entries) == 2
        for entry in entries:
            count = len(entry["completion_token_ids"])
            assert 0 < count == len(entry["per_token_logps"]) == len(entry["completion_tokens"])
            assert entry["loss_mask"] == [0] * len(entry["prompt_token_ids"]) + [1] * count
            assert entry["reward"] == 1.0
            assert "seed" not in entry["request"], "it is the group's, and equal prompts would give equal samples"
        trace = session.fetch_training_trace()
        assert [turn.completion_token_ids for turn in trace.turns] == [row["completion_token_ids"] for row in entries]
        assert '"tool_use"' in session.fetch_trace()
        messages = session.list_messages()
        assert [message["info"]["role"] for message in messages] == ["user", "assistant", "assistant"]
        name, client = session.serve_session_id, session.serve_client
        assert name == messages[1]["info"]["sessionID"]
        assert (session.driver, client is None) == (driver, driver == "cli")
        if client is not None:
            assert name and client.list_messages(name) == messages
            assert client.get_all_status() == {name: {"idle": True}}
            with pytest.raises(LookupError, match="ses_none"):
                client.list_messages("ses_none")
        assert session.sandbox.read_text(published.INSTRUCTION_PATH) == "Write hello."
        assert session.sandbox.read_text(published.AGENT_LOG) == session.fetch_trace()
        assert session.sandbox.read_text(published.PROXY_LOG) == ""
        summary = collect_rollout_summary(session)
        assert summary.workdir_contents[f"{WORKDIR}/hello.txt"] == "hello\n"
        assert "given.txt" in summary.workdir_listing
        assert summary.tool_calls() == ["bash"]
        assert summary.productive_turn_count() == 2
    finally:
        session.close()
    assert len(session.fetch_proxy_trace()) == 2, "what was recorded outlives the box"
    with pytest.raises(SandboxError):
        session.sandbox.exec("true")


def test_openenvs_rollout_function_works_with_our_factory(factory: Make) -> None:
    def unused(messages: object, tools: object, sampling: object) -> ModelStepResult:
        pytest.fail("the agent has a model of its own")

    rollout = build_harness_rollout_func(
        session_factory=factory(),
        harness_adapter=OpenCodeHarnessAdapter(),
        model_step_builder=lambda trainer, session: unused,
    )
    rows = rollout([TASK], None)
    assert rows["env_reward"] == [1.0]
    assert rows["verify_metrics"] == [{"right": True}]
    assert len(rows["completion_ids"][0]) == len(rows["logprobs"][0]) > 0
    assert rows["prompt_ids"][0]


def test_the_adapter_gives_one_sequence_as_the_model_saw_it(factory: Make) -> None:
    session = factory().create([{"role": "system", "content": "s"}, {"role": "user", "content": "Write hello."}])
    try:
        result = OpenCodeHarnessAdapter().run_black_box(session)
        first, last = session.fetch_training_trace().turns
    finally:
        session.close()
    assert session.task.instruction == "Write hello."
    assert result.prompt_ids == first.prompt_token_ids
    assert result.prompt_ids + result.completion_ids == last.prompt_token_ids + last.completion_token_ids
    mask = result.metrics["env_mask"]
    assert len(mask) == len(result.completion_ids) == len(result.logprobs)
    said = [token for token, own in zip(result.completion_ids, mask, strict=True) if own]
    assert said == first.completion_token_ids + last.completion_token_ids
    assert [
        p for p, own in zip(result.logprobs, mask, strict=True) if own
    ] == first.per_token_logps + last.per_token_logps
    assert {p for p, own in zip(result.logprobs, mask, strict=True) if not own} == {0.0}, "a tool's answer is between"
    assert result.metrics["turns_in_sequence"] == result.metrics["turns"] == 2


def test_where_an_engine_tells_only_some_tokens_of_an_answer_the_lists_are_empty(
    model: ScriptedModel, backend: LocalSandboxBackend
) -> None:
    """OpenAI tells the tokens of a text, and not those of a tool call beside it."""
    both = ScriptedTurn(text="Let me look.", tool_calls=bash("echo hi").tool_calls)
    endpoint = model.endpoint((both, ScriptedTurn(text="Done.")), profile="openai")
    config = OpenCodeConfig(base_url=endpoint.base_url, api_key=endpoint.key.get_secret_value(), model=endpoint.model)
    factory = OpenCodeSessionFactory(config=config, sandbox_backend=backend, mode="transparent_proxy")
    session = factory.create("Look.")
    try:
        assert session.wait_for_completion(timeout_s=300) == 0
        called, said = session.fetch_proxy_trace()
    finally:
        session.close()
    assert called["completion_tokens"] == [] and called["response"]["usage"]["completion_tokens"] > 0
    assert len(said["completion_tokens"]) == said["response"]["usage"]["completion_tokens"]
    assert called["completion_token_ids"] == said["completion_token_ids"] == said["per_token_logps"] == []


def test_a_session_of_the_agents_server_can_be_followed_from_the_start(factory: Make) -> None:
    session = factory(HANGS, driver="serve").create("Talk.")
    try:
        name, client = session.serve_session_id, session.serve_client
        assert name is not None and client is not None
        assert client.get_all_status() == {name: {"idle": False}}
        assert client.abort(name)
        assert client.get_all_status() == {name: {"idle": True}}
    finally:
        session.close()


@pytest.mark.slow
def test_openenvs_own_white_box_harness_can_hold_a_session_too(factory: Make) -> None:
    """Its model speaks once and uses no tool; the agent in the box, still at it, is stopped for verification."""
    step = ModelStepResult(response=LLMResponse(content="hi"), prompt_ids=[1], completion_ids=[2], logprobs=[-0.5])

    def judge(sandbox: SandboxHandle, task: OpenCodeTask) -> VerifyResult:
        return VerifyResult(env_reward=0.25, done=True)

    rollout = build_harness_rollout_func(
        session_factory=factory(HANGS, verifier=judge),
        harness_adapter=MCPHarnessAdapter(),
        model_step_builder=lambda trainer, session: lambda messages, tools, sampling: step,
    )
    rows = rollout(["Do it."], None)
    assert (rows["env_reward"], rows["completion_ids"]) == ([0.25], [[2]])


def test_an_abort_stops_the_agent_and_keeps_what_was_recorded(factory: Make) -> None:
    session = factory(HANGS, driver="serve").create("Talk.")
    try:
        with pytest.raises(TimeoutError, match="had not ended"):
            session.wait_for_completion(timeout_s=0.5)
        while not any(part["type"] == "text" for message in session.list_messages()[1:] for part in message["parts"]):
            with pytest.raises(TimeoutError):
                session.wait_for_completion(0.2)
        assert session.abort()
        assert not session.abort(), "there is nothing left to stop"
        assert session.wait_for_completion() == 137
        assert session.list_messages()[-1]["info"]["error"]["name"] == "MessageAbortedError"
        [turn] = session.fetch_proxy_trace()
        assert turn["completion_tokens"] and not any(turn["loss_mask"]), "half an answer is kept, and is not trained"
        assert session.fetch_training_trace().turns == []
    finally:
        session.close()


@pytest.mark.slow
def test_an_agent_that_uses_up_its_budget_is_a_timeout(factory: Make) -> None:
    session = factory(HANGS, config={"agent_timeout_s": 3.0}).create("Talk.")
    try:
        with pytest.raises(TimeoutError, match="3 s were up"):
            session.wait_for_completion()
    finally:
        session.close()


@pytest.mark.slow
def test_black_box_sessions_record_nothing(factory: Make) -> None:
    session = factory(mode="black_box").create(TASK)
    try:
        assert session.wait_for_completion() == 0
        assert session.fetch_proxy_trace() == []
        with pytest.raises(RuntimeError, match="transparent_proxy"):
            session.fetch_training_trace()
    finally:
        session.close()


@pytest.mark.slow
def test_the_agent_can_be_started_later(factory: Make) -> None:
    session = factory().create(TASK, start_agent=False)
    try:
        with pytest.raises(RuntimeError, match="start_agent"):
            session.wait_for_completion()
        assert session.sandbox.read_text(f"{WORKDIR}/seed.txt") == "seeded\n"
        session.start_agent()
        session.start_agent()
        assert session.wait_for_completion() == 0
    finally:
        session.close()


def test_any_provider_of_rollcage_can_be_given(factory: Make, state_dir: Path) -> None:
    session = factory(sandbox_backend=LocalProvider(state_dir)).create(TASK)
    try:
        assert session.wait_for_completion(timeout_s=300) == 0
        assert session.verify(transcript=[]).env_reward == 1.0
    finally:
        session.close()


def test_factories_can_be_sent_to_another_process(factory: Make) -> None:
    """Trainers pickle them for their workers."""
    assert isinstance(pickle.loads(pickle.dumps(factory())), OpenCodeSessionFactory)


def test_a_session_that_is_made_by_hand_judges_and_closes(backend: LocalSandboxBackend) -> None:
    handle = backend.create()
    handle.write_text(f"{WORKDIR}/hello.txt", "something else")
    config, task = OpenCodeConfig(base_url="http://127.0.0.1:9/v1"), OpenCodeTask.coerce(TASK)
    session = OpenCodeSession(sandbox=handle, config=config, task=task, verifier=verifier)
    assert session.initial_messages() == [{"role": "user", "content": "Write hello."}]
    assert session.verify(transcript=[]).env_reward == 0.0
    session.close()
    with pytest.raises(SandboxError):
        handle.exec("true")


def test_a_summary_of_hostile_events_is_plain_text() -> None:
    odd: list[JsonObject] = [{}, {"type": "tool_use"}, {"type": "tool_use", "part": {"tool": "\x1b]0;owned\x07bash"}}]
    wrong = [{"type": "error", "error": {"data": data}} for data in (None, {"message": "\x1b[8m!"})]
    files = {f"{WORKDIR}/\x1b]52;c;eA==\x07\nx": "text"}
    printed = io.StringIO()
    print_rollout_summary(RolloutSummary("box\x1b[2J", [], [*odd, *wrong], "", files), stream=printed)
    assert all(line.isprintable() for line in printed.getvalue().splitlines())
    assert len(printed.getvalue().splitlines()) == 7
    assert "tool calls   2: unknown, " in printed.getvalue()


def test_a_setup_that_fails_gives_no_session(factory: Make) -> None:
    with pytest.raises(RuntimeError, match=r"setup_failed.*exit code 3"):
        factory().create({"instruction": "x", "setup_shell": "exit 3"})


def test_a_model_that_cannot_be_reached_is_named_before_a_box_is_opened(backend: LocalSandboxBackend) -> None:
    config = OpenCodeConfig(base_url="http://127.0.0.1:9", model="m")
    with pytest.raises(ModelUnreachable, match=r"127\.0\.0\.1:9"):
        OpenCodeSessionFactory(config=config, sandbox_backend=backend).create("x")


def test_what_cannot_be_is_refused_at_once(backend: LocalSandboxBackend) -> None:
    config = OpenCodeConfig(base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match="Unknown mode"):
        OpenCodeSessionFactory(config=config, sandbox_backend=backend, mode="glass_box")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unknown driver"):
        OpenCodeSessionFactory(config=config, sandbox_backend=backend, driver="telepathy")
    with pytest.raises(UsageError, match=r"sandbox_backend: object .*LocalSandboxBackend.*E2BSandboxBackend.*provider"):
        OpenCodeSessionFactory(config=config, sandbox_backend=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Cannot coerce a int"):
        OpenCodeTask.coerce(3)
    tools = config.model_copy(update={"disabled_tools": ["teleport"]})
    with pytest.raises(UsageError, match="teleport"):
        OpenCodeSessionFactory(config=tools, sandbox_backend=backend).create("x")


def test_a_task_is_a_string_a_dict_or_a_task() -> None:
    task = OpenCodeTask(instruction="x")
    assert OpenCodeTask.coerce(task) is task
    assert OpenCodeTask.coerce("x") == task == OpenCodeTask.coerce({"instruction": "x"})


@pytest.mark.parametrize(
    ("model", "name"),
    [("intercepted/Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-4B"), ("openai/gpt-4o", "gpt-4o"), ("Qwen/Qwen3", "Qwen/Qwen3")],
)
def test_the_provider_before_the_models_name_is_taken_off(model: str, name: str) -> None:
    assert OpenCodeConfig(base_url="http://x", model=model).endpoint().model == name


def test_a_box_does_what_the_published_handle_does(backend: LocalSandboxBackend) -> None:
    assert isinstance(backend, SandboxBackend)
    handle = backend.create(timeout_s=60, envs={"GREETING": "salut"}, metadata={"episode_id": "e"})
    assert isinstance(handle, SandboxHandle)
    try:
        handle.write_text("/home/user/deep/file.txt", "text é")
        assert handle.read_text("/home/user/deep/file.txt") == "text é"
        assert handle.exists("/home/user/deep")
        assert not handle.exists("/home/user/none")
        done = handle.exec("echo $GREETING $MORE; pwd; echo no >&2; exit 3", envs={"MORE": "x"}, cwd="/home/user/deep")
        assert (done.exit_code, done.stdout, done.stderr) == (3, "salut x\n/home/user/deep\n", "no\n")
        assert handle.exec("sleep 60", timeout=0.3).exit_code == 124
        job = handle.start_bg("touch ~/began; sleep 60")
        assert isinstance(job, BgJob)
        with pytest.raises(TimeoutError):
            job.wait(timeout=0.1)
        job.kill()
        assert job.wait() == 137
        assert handle.start_bg("exit 4").wait(120) == 4
    finally:
        handle.kill()
    handle.kill()
    with pytest.raises(SandboxError):
        handle.exec("true")


def test_a_box_lives_no_longer_than_it_was_asked_to(backend: LocalSandboxBackend) -> None:
    handle = backend.create(timeout_s=1)
    with pytest.raises(SandboxError):
        while True:
            handle.exec("sleep 0.1")


def test_e2b_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="E2B_API_KEY"):
        E2BSandboxBackend()


def test_every_published_name_can_be_imported() -> None:
    for name in opencode_env.__all__:
        assert getattr(opencode_env, name) is not None
    assert issubclass(OpenCodeSession, object)


def test_importing_the_package_costs_nothing_and_a_process_that_forgets_to_close_still_ends(state_dir: Path) -> None:
    code = """
import sys, opencode_env
assert "openenv" not in sys.modules and "rollcage.run" not in sys.modules
from pathlib import Path
from opencode_env.sandbox import LocalSandboxBackend
handle = LocalSandboxBackend(state_dir=Path(sys.argv[1])).create()
handle.start_bg("sleep 600")
print(handle.exec("echo ok").stdout)
"""
    done = subprocess.run([sys.executable, "-c", code, str(state_dir)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ok", "")
