"""From arguments to jobs, from a log to a transcript, and who may run: no server needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import pytest
from pydantic import SecretStr

from rollcage.agent_events import AgentOutput
from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode import OpenCode
from rollcage.endpoints import check_address
from rollcage.errors import QueueFull, UsageError
from rollcage.events import AgentEmitted, Ended, Entry, Event, Queued, Requeued, TurnEnded
from rollcage.jobs import rebuild_job, to_job
from rollcage.runner.queue import FairQueue, Quota
from rollcage.schema.fingerprint import fingerprint
from rollcage.schema.request import RolloutRequest
from rollcage.server.transcript import transcript_of
from rollcage.settings import Settings
from rollcage.store.redact import hidden
from rollcage.types import Alternative, Check, Endpoint, Job, Outcome, ScriptedTurn, Token, Turn
from support.opencode_events import opencode

SETTINGS = Settings.from_environ(
    {
        "ROLLCAGE_HOME": "/nowhere",
        "VLLM_URL": "http://engine:8000",
        "OPENAI_API_KEY": "sk-of-the-server",
        "HF_ROUTER_API_KEY": "hf-of-the-server",
    }
)


def scripted(turns: Sequence[ScriptedTurn]) -> Endpoint:
    return Endpoint(base_url="http://127.0.0.1:1/v1", model="scripted", key=SecretStr("s"), kind="scripted")


def job_of(**arguments: object) -> Job:
    return to_job(RolloutRequest.parsed({"instruction": "do it", **arguments}), SETTINGS, scripted=scripted).job


def test_null_is_the_same_as_not_given() -> None:
    names = ("setup", "verify", "upload_files", "template", "task_id", "base_url", "api_key", "test_script", "tests")
    assert job_of(endpoint="vllm", **dict.fromkeys(names)) == job_of(endpoint="vllm")
    with pytest.raises(UsageError, match="instruction"):
        RolloutRequest.parsed({"instruction": None})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"setup": "one command"}, "setup: must be a list"),
        ({"upload_files": ["a.txt"]}, "upload_files: must be an object"),
        ({"solution": [{"tool_call": []}]}, "unknown argument 'solution.0.tool_call'; did you mean 'tool_calls'?"),
        ({"solution": [{"tool_calls": [{"name": "bash", "argument": {}}]}]}, "did you mean 'arguments'?"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_json(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        RolloutRequest.parsed({"instruction": "do it", **arguments})
    assert said in str(caught.value) and caught.value.argument == next(iter(arguments))


def test_the_newer_shape_means_what_it_says() -> None:
    job = job_of(
        endpoint="vllm",
        model="m",
        setup=["a", "b"],
        verify=["c"],
        upload_files={"x.py": "1"},
        disable_thinking=False,
        max_tokens_cap=7,
        top_logprobs=3,
        agent_timeout_s=5,
        timeout_s=50,
        seed=9,
        temperature=0.5,
        template="big",
        mode="black_box",
    )
    assert (job.task.setup, job.task.verify, job.task.files) == (("a", "b"), ("c",), {"x.py": "1"})
    assert (job.model.base_url, job.model.model, job.model.kind) == ("http://engine:8000/v1", "m", "vllm")
    sampling = job.model.sampling
    assert (sampling.thinking, sampling.top_logprobs, sampling.seed, sampling.temperature) == (None, 3, 9, 0.5)
    assert (job.task.limits.max_tokens_cap, job.task.limits.agent_timeout_s, job.task.limits.timeout_s) == (7, 5, 50)
    assert (job.sandbox.template, job.mode) == ("big", "black_box")


def test_the_server_drives_opencode_live_unless_it_is_told_otherwise() -> None:
    assert job_of(endpoint="vllm").agent.driver == "serve"
    assert job_of(endpoint="vllm", driver="run").agent.driver == "run"
    assert job_of(endpoint="vllm", agent="shell").agent.driver == ""


def test_the_published_image_is_what_every_box_has_anyway() -> None:
    assert job_of(endpoint="vllm", template="opencode-rl").sandbox.template == ""
    assert job_of(endpoint="vllm", template="opencode-rl", sandbox="e2b").sandbox.template == "opencode-rl"


@pytest.mark.parametrize("argument", ["upload_files", "tests"])
def test_a_path_that_leads_out_names_its_argument(argument: str) -> None:
    with pytest.raises(UsageError, match="does not name a file below") as caught:
        job_of(endpoint="vllm", **{argument: {"../../x": "1"}})
    assert caught.value.argument == argument and str(caught.value).startswith(f"{argument}: ")


def test_the_older_shape_means_the_same() -> None:
    job = job_of(
        model_key="vllm://org/model",
        vllm_url="http://mine:9/v1",
        thinking=False,
        setup_shell="pip list",
        test_script="echo 1 > $REWARD_FILE",
        task_id="t",
    )
    assert (job.model.base_url, job.model.model) == ("http://mine:9/v1", "org/model")
    assert job.model.sampling.thinking is False
    assert (job.task.setup, job.task.test_script, job.task.id) == (("pip list",), "echo 1 > $REWARD_FILE", "t")
    router = job_of(model_key="hf-router://org/model:fast", hf_token="hf-mine")
    assert (router.model.model, router.model.key.get_secret_value()) == ("org/model:fast", "hf-mine")


def test_a_request_says_whether_a_later_server_could_run_it() -> None:
    def because(**arguments: object) -> str:
        request = RolloutRequest.parsed({"instruction": "x", **arguments})
        return to_job(request, SETTINGS, scripted=scripted).not_resumable_because

    assert because(endpoint="vllm") == because(endpoint="openai") == because(endpoint="scripted") == ""
    assert "key" in because(endpoint="openai", api_key="sk-mine-alone")
    assert "address" in because(endpoint="vllm", base_url="http://other:1")


def test_a_job_out_of_the_log_gets_its_key_back_only_at_its_own_address() -> None:
    job = job_of(endpoint="openai", temperature=0.25)
    stored = Job.model_validate_json(job.model_dump_json())
    assert stored.model.key.get_secret_value() == ""
    back = rebuild_job(stored, SETTINGS, scripted=scripted)
    assert back.model == job.model
    moved = stored.model_copy(update={"model": stored.model.model_copy(update={"base_url": "http://evil/v1"})})
    with pytest.raises(Exception, match="another address"):
        rebuild_job(moved, SETTINGS, scripted=scripted)


def test_a_key_of_the_server_is_used_at_the_server_s_address_only() -> None:
    assert job_of(endpoint="openai").model.key.get_secret_value() == "sk-of-the-server"
    with pytest.raises(UsageError, match="server's own key") as error:
        job_of(endpoint="openai", base_url="http://evil")
    assert error.value.argument == "api_key"
    assert job_of(endpoint="openai", base_url="http://evil", api_key="mine").model.key.get_secret_value() == "mine"


@pytest.mark.parametrize(
    ("url", "allowed", "fits"),
    [
        ("http://a/v1", [], True),
        ("http://a/v1", ["http://a"], True),
        ("http://a:80/v1", ["http://a/v1"], True),
        ("https://a/v1", ["http://a"], False),
        ("http://a:81/v1", ["http://a"], False),
        ("http://a.evil/v1", ["http://a"], False),
        ("http://A/v1", ["http://a"], True),
        ("http://a/x/v1", ["http://b", "http://a/x"], True),
        ("http://a/xy/v1", ["http://a/x"], False),
        ("http://a/x/../v1", ["http://a/x"], False),
        ("http://a/x/%2e%2e/v1", ["http://a/x"], False),
    ],
)
def test_an_address_is_allowed_by_its_origin_and_path(url: str, allowed: list[str], fits: bool) -> None:
    if fits:
        check_address(url, allowed)
    else:
        with pytest.raises(UsageError, match="base_url"):
            check_address(url, allowed)


def log(*events: Event) -> list[Entry]:
    return [Entry(rollout_id="r", seq=number, time=number, event=event) for number, event in enumerate(events, 1)]


def said(kind: str, part: Mapping[str, object]) -> AgentEmitted:
    return opencode({"type": kind, "sessionID": "ses_1", "timestamp": 5, "part": part})


def test_a_transcript_has_the_instruction_and_what_the_agent_said_in_its_own_shape(tmp_path: Path) -> None:
    agents = {"opencode": OpenCode(Downloads(tmp_path))}
    queued = Queued(job=job_of(endpoint="scripted"))
    text = {"id": "prt_2", "messageID": "msg_1", "type": "text", "text": "hello"}
    tool = {"id": "prt_1", "messageID": "msg_1", "type": "tool", "tool": "bash", "state": {"status": "completed"}}
    messages = transcript_of(log(queued, said("tool_use", tool), said("text", text)), agents)
    assert [message.info["role"] for message in messages] == ["user", "assistant"]
    assert messages[0].parts[0]["text"] == "do it"
    assert messages[1].parts == [tool, text]
    assert messages[1].info["sessionID"] == "ses_1"
    odd = [opencode({"type": 3}), opencode({"type": "text", "part": [1]}), opencode({})]
    assert len(transcript_of(log(queued, *odd), agents)) == 1


def test_a_transcript_begins_anew_with_a_rollout_that_does_and_has_what_a_script_prints() -> None:
    queued, printed = Queued(job=job_of(endpoint="scripted")), AgentEmitted(event=AgentOutput(text="hi\n"))
    again_ = Requeued(owner="b", previous="a")
    messages = transcript_of(log(queued, printed, again_, printed), {})
    assert [part["text"] for message in messages for part in message.parts] == ["do it", "hi\n"]


def test_what_echoes_a_key_is_logged_without_it() -> None:
    key = "sk-0123456789"
    ended = hidden(Ended(outcome=Outcome.MODEL_UNREACHABLE, error=f"wrong key {key}!"), key)
    assert isinstance(ended, Ended) and ended.error == "wrong key [key]!"
    heard = hidden(opencode({"type": "error", "error": {"data": {"message": f"x{key}"}, key: 1}}), key)
    assert isinstance(heard, AgentEmitted) and key not in str(heard)
    broken = TurnEnded(turn=Turn(index=0, request={}, status=401, error=f"said {key}", message={"content": key}))
    cleaned = hidden(broken, key)
    assert key not in cleaned.model_dump_json()
    whole = TurnEnded(turn=Turn(index=0, request={}, status=200, message={"content": key[:-1]}))
    assert hidden(whole, key) is whole
    assert hidden(Ended(outcome=Outcome.ABORTED, error="x"), "x").model_dump()["error"] == "x"


def test_a_whole_turn_that_echoes_a_key_is_logged_without_it_and_is_not_trained_on() -> None:
    key = "sk-0123456789"
    kept = (Token("a", 1, -0.1), Token("b", 2, -0.2))
    spelled = tuple(Token(letter, n, -0.1) for n, letter in enumerate(f"it is {key}."))
    for turn in (
        Turn(index=0, request={}, status=200, message={"content": f"it is {key}"}, tokens=kept, trainable=True),
        Turn(index=0, request={"messages": [{"content": key}]}, status=200, tokens=kept, trainable=True),
        Turn(index=0, request={"x": "\ud800"}, usage={"by": key}, status=200, tokens=kept, trainable=True),
    ):
        logged = hidden(TurnEnded(turn=turn), key)
        assert isinstance(logged, TurnEnded) and key not in str(logged)
        # What the engine sampled is not changed.
        assert (logged.turn.tokens, logged.turn.trainable) == (kept, False)
        assert "repeats a key" in logged.turn.untrainable_reason
    for tokens in (spelled, (Token("a", 1, -0.1, (Alternative(key, 7, -3.0),)),)):
        echo = Turn(index=0, request={}, status=200, tokens=tokens, trainable=True)
        logged = hidden(TurnEnded(turn=echo), key)
        assert isinstance(logged, TurnEnded)
        assert (logged.turn.tokens, logged.turn.trainable) == ((), False)
    whole = TurnEnded(turn=Turn(index=0, request={}, status=200, tokens=spelled[:-2], trainable=True))
    assert hidden(whole, key) is whole


async def test_places_go_to_who_came_first_but_nobody_waits_for_a_caller_at_its_limit() -> None:
    queue = FairQueue(2, queue=3)
    alice, bob = Quota("alice", 1, 1), Quota("bob")
    first = queue.take(alice)
    second = queue.take(alice)
    assert (first.position, second.position) == (None, 1)
    with pytest.raises(QueueFull, match="of this key"):
        queue.take(alice)
    third, fourth = queue.take(bob), queue.take(bob)
    assert (third.position, second.position, fourth.position) == (None, 1, 2)
    fifth = queue.take(bob)
    with pytest.raises(QueueFull, match="3 rollouts wait"):
        queue.take(bob)
    assert queue.take(bob, always=True).position == 4
    third.leave()
    assert (fourth.position, second.position, fifth.position) == (None, 1, 2)
    first.leave()
    first.leave()
    assert second.position is None
    assert (queue.running, queue.waiting) == (2, 2)
    with anyio.move_on_after(0.01):
        async with fifth:
            raise AssertionError("there was no place")
    assert queue.waiting == 1


async def test_no_caller_can_fill_a_queue_that_it_shares() -> None:
    queue = FairQueue(1, queue=8)
    alice, bob, carol = (Quota(name, alone=False) for name in ("alice", "bob", "carol"))
    queue.take(alice)

    def taken(quota: Quota) -> int:
        count = 0
        with pytest.raises(QueueFull) as full:
            while True:
                queue.take(quota)
                count += 1
        words.append(str(full.value))
        return count

    words: list[str] = []
    assert [taken(quota) for quota in (alice, bob, carol)] == [4, 2, 1]
    assert words[0] == (
        "4 rollouts of this key wait already, and the last 4 of 8 places in the queue are kept for others; "
        "try again later"
    )
    assert taken(Quota("dave", queue=5, alone=False)) == 1, "the operator's own number is what counts"
    assert words[-1] == "8 rollouts wait already, and no more may; try again later"


async def test_a_caller_who_is_alone_may_fill_the_queue() -> None:
    queue = FairQueue(1, queue=4)
    for _ in range(5):
        queue.take(Quota("alice"))
    with pytest.raises(QueueFull, match="4 rollouts wait already"):
        queue.take(Quota("alice"))


def test_a_fingerprint_tells_every_argument_but_keys_and_none_that_says_nothing() -> None:
    bare = RolloutRequest(instruction="x")
    assert fingerprint(bare).keys() == {"instruction"}
    spelled = RolloutRequest.parsed({"instruction": "x", "setup": [], "max_turns": 0, "idempotency_key": "k"})
    assert fingerprint(spelled) == fingerprint(bare)
    secret = RolloutRequest.parsed({"instruction": "x", "api_key": "sk-1", "hf_token": "hf-1"})
    assert fingerprint(secret) == fingerprint(bare)
    for name, field in RolloutRequest.model_fields.items():
        if name not in ("instruction", "api_key", "hf_token", "idempotency_key"):
            other = bare.model_copy(update={name: OTHER.get(name, "other")})
            assert fingerprint(other).keys() == {"instruction", name}, field
            again = bare.model_copy(update={name: OTHER.get(name, "other")})
            assert fingerprint(again) == fingerprint(other)


OTHER: dict[str, object] = {
    **dict.fromkeys(("thinking", "disable_thinking", "isolate"), True),
    **dict.fromkeys(("keep_reasoning", "seal_tests", "guards"), False),
    **dict.fromkeys(("temperature", "agent_timeout_s", "setup_timeout_s", "verify_timeout_s", "timeout_s"), 1.5),
    **dict.fromkeys(("seed", "environment_seed", "top_logprobs", "max_tokens_cap", "max_turns"), 7),
    **dict.fromkeys(
        ("setup", "verify", "enabled_tools", "disabled_tools", "setup_hosts", "verify_hosts", "keep"), ("a",)
    ),
    "restore": ("a",),
    "reward_from": "commands",
    "keep_reasoning": False,
    "metadata": {"a": 1},
    "upload_files": {"a": "b"},
    "tests": {"a": "b"},
    "solution": (ScriptedTurn(text="a"),),
    "checks": (Check(kind="command", command="true"),),
    "verify_in": "fresh",
    "history": "exact",
    "system": "host",
    "mode": "black_box",
}
"""Some other value of each argument that is no text."""


async def test_a_caller_who_asked_for_much_does_not_hold_up_one_who_asked_later() -> None:
    queue = FairQueue(4)
    alice, bob = Quota("alice"), Quota("bob")
    hers = [queue.take(alice) for _ in range(12)]
    his = [queue.take(bob) for _ in range(3)]
    assert [slot.position for slot in his] == [1, 2, 5]
    assert [slot.position for slot in hers[3:8]] == [None, 3, 4, 6, 7]
    foreseen = sorted((slot for slot in (*hers, *his) if slot.position), key=lambda slot: slot.position or 0)
    running = hers[:4]
    for expected in foreseen:
        running.pop(0).leave()
        assert expected.granted.is_set() and expected.position is None
        running.append(expected)


async def test_callers_take_turns_at_a_single_place() -> None:
    queue = FairQueue(1)
    first = queue.take(Quota("alice"))
    slots = {"alice": [queue.take(Quota("alice")) for _ in range(3)]}
    slots |= {name: [queue.take(Quota(name)) for _ in range(2)] for name in ("bob", "carol")}
    waiting = [(slot.position, name) for name, line in slots.items() for slot in line]
    assert [name for _, name in sorted(waiting, key=str)] == "bob carol alice bob carol alice alice".split()
    first.leave()
    assert slots["bob"][0].granted.is_set()
