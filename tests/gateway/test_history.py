"""`history = "exact"`: prompts that continue the sampled tokens, against a model whose template re-writes history."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support.steady  # noqa: F401
from rollcage.gateway import Gateway, exact
from rollcage.gateway.history import History, Seam, seam_of
from rollcage.simulators import ScriptedModel
from rollcage.simulators.scripted import app, request, template
from rollcage.simulators.scripted.request import Refused
from rollcage.simulators.scripted.shapes import Shapes
from rollcage.simulators.scripted.tokenizer import default_tokenizer
from rollcage.trajectory import report, sequences
from rollcage.types import AgentSpec, Limits, Outcome, ScriptedCall, ScriptedTurn, Task, Token, Turn
from support.hand_made import Rig, rig
from support.playing import Play

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Begin."}
ODD = '{ "command":"ls",   "n": 5.0 }'
"""Arguments that no template writes like this."""
CALL = ScriptedTurn(text="I look.", reasoning="Hm.", tool_calls=(ScriptedCall(name="bash", raw_arguments=ODD),))
TEXT = ScriptedTurn(text="So it is.")
SCRIPT = (CALL, CALL, TEXT, TEXT)
END = default_tokenizer().eos


def sampled(turn: Turn) -> tuple[int | None, ...]:
    """What a later prompt should begin with."""
    return (*turn.prompt_ids, *(token.id for token in turn.tokens))


def continues(turn: Turn, before: Turn) -> bool:
    return turn.prompt_ids[: len(sampled(before))] == sampled(before)


def compacted(message: dict[str, Any], *, thoughts: bool = False) -> dict[str, Any]:
    """An answer as agents send it back: JSON written anew, blanks trimmed, calls renamed, thoughts dropped."""
    calls = [
        {
            "id": f"renamed-{n}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":")),
            },
        }
        for n, call in enumerate(message.get("tool_calls") or ())
    ]
    kept = {"reasoning_content": message["reasoning_content"]} if thoughts and "reasoning_content" in message else {}
    content = [{"type": "text", "text": message["content"].strip()}]
    return {"role": "assistant", "content": content, **kept, **({"tool_calls": calls} if calls else {})}


class Talk:
    """An agent that sends each answer back in other words, and a result or a remark behind it."""

    def __init__(self, gate: Rig, **beside: Any) -> None:
        self._gate, self.beside = gate, {"tools": [TOOL], **beside}
        self.messages: list[dict[str, Any]] = [SYSTEM, USER]

    async def turn(self, **beside: Any) -> Turn:
        body = {"model": "model", "messages": self.messages, "stream": True, **self.beside, **beside}
        assert (await self._gate.ask(body)).status == 200
        turn = self._gate.recorded[-1]
        answer = compacted(turn.message)
        results = [{"role": "tool", "tool_call_id": "x", "content": "a.txt"} for _ in answer.get("tool_calls", ())]
        self.messages = [*self.messages, answer, *(results or [{"role": "user", "content": "Go on."}])]
        return turn


@asynccontextmanager
async def talking(
    model: ScriptedModel, script: Sequence[ScriptedTurn] = SCRIPT, *, profile: str = "vllm-0.32", **sampling: Any
) -> AsyncIterator[Talk]:
    endpoint = model.endpoint(script, profile=profile, **{"history": "exact", **sampling})
    async with Gateway.open() as gateway:
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            yield Talk(gate)


async def turns_of(talk: Talk, count: int) -> list[Turn]:
    return [await talk.turn() for _ in range(count)]


@pytest.mark.parametrize("profile", ["vllm-0.32", "sglang"])
async def test_every_prompt_begins_with_the_last_prompt_and_what_was_sampled(
    model: ScriptedModel, profile: str
) -> None:
    async with talking(model, profile=profile) as talk:
        first, second, third, fourth = await turns_of(talk, 4)
    assert [turn.untrainable_reason for turn in (first, second, third, fourth)] == [""] * 4
    assert [continues(*pair) for pair in ((second, first), (third, second), (fourth, third))] == [True] * 3
    assert first.history is not None
    assert (first.history.exact, first.history.reason) == (False, "it begins a conversation")
    assert second.history is not None
    assert (second.history.exact, second.history.reason, second.history.turn) == (True, "", 0)
    assert second.history.kept == len(sampled(first))
    assert second.history.changed == ("arguments", "reasoning")
    assert second.history.differs_at == len(first.prompt_ids), "the template has no thought there"
    assert second.history.rendered != len(second.prompt_ids)
    assert not {"kv_transfer_params", "input_ids"} & second.request.keys(), "the log has them as prompt_ids"
    tail = default_tokenizer().decode(second.prompt_ids[second.history.kept :])
    assert tail == "\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


async def test_without_it_the_same_agent_drifts_in_every_turn(model: ScriptedModel) -> None:
    async with talking(model, history="as_sent") as talk:
        first, second, third = await turns_of(talk, 3)
    assert [continues(second, first), continues(third, second)] == [False, False]
    assert [turn.history for turn in (first, second, third)] == [None] * 3


async def test_an_answer_that_was_cut_gets_the_end_that_the_template_would_give_it(model: ScriptedModel) -> None:
    async with talking(model) as talk:
        talk.beside["tools"] = []
        cut = await talk.turn(max_tokens=3)
        assert cut.finish_reason == "length"
        stopped = await talk.turn(stop=["So"], tool_choice=None)
        after = await talk.turn()
    assert continues(stopped, cut)
    assert stopped.prompt_ids[len(sampled(cut))] == END
    assert continues(after, stopped)
    assert after.history is not None
    assert after.history.exact


async def test_branches_of_one_conversation_each_continue_what_they_share(model: ScriptedModel) -> None:
    async with talking(model) as talk:
        first = await talk.turn()
        fork = list(talk.messages)
        second = await talk.turn()
        talk.messages = [*fork, {"role": "user", "content": "Or otherwise?"}]
        other = await talk.turn()
    assert continues(second, first)
    assert continues(other, first)
    assert other.prompt_ids != second.prompt_ids


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"messages": [{"role": "system", "content": "Be long."}]}, "no answer in it is as the model gave it"),
        ({"tools": [TOOL, TOOL]}, "no answer in it is as the model gave it"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "no answer in it is as the model gave it"),
        ({"n": 2}, "it asks for several answers"),
        ({"add_generation_prompt": False}, "it continues a message"),
        ({"image": True}, "not all of its messages are text"),
    ],
    ids=["system", "tools", "template", "several", "continued", "image"],
)
async def test_where_the_conversation_is_another_one_the_prompt_is_the_templates(
    model: ScriptedModel, change: dict[str, Any], reason: str
) -> None:
    async with talking(model) as talk:
        await talk.turn()
        if "messages" in change:
            talk.messages[0] = change["messages"][0]
            change = {}
        if change.pop("image", False):
            talk.messages[1] = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
        turn = await talk.turn(**change)
    assert turn.history is not None
    assert (turn.history.exact, turn.history.reason) == (False, reason)
    assert turn.status == 200


@pytest.mark.parametrize("profile", ["vllm-0.20", "openai", "llamacpp"])
async def test_an_engine_that_takes_no_ids_is_given_none_and_the_turn_says_so(
    model: ScriptedModel, profile: str
) -> None:
    async with talking(model, profile=profile) as talk:
        _, second = await turns_of(talk, 2)
    assert second.history is not None
    assert second.history.reason == "this engine takes no prompt as ids; vLLM from 0.32 on does, and SGLang"
    assert second.status == 200


async def test_an_engine_that_takes_the_ids_and_prompts_otherwise_is_found_out(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(Shapes, "given_prompt", lambda _, body: seen.append(body.get("kv_transfer_params")))
    async with talking(model) as talk:
        _, second, third = await turns_of(talk, 3)
    assert second.history is not None
    assert second.history.reason == "the engine's prompt is not the one that was sent"
    assert third.history is not None
    assert third.history.reason.startswith("this engine takes no prompt as ids")
    assert [each is not None for each in seen] == [False, True, False]


async def test_ids_that_the_engine_refuses_cost_the_agent_nothing(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: Shapes, body: dict[str, Any]) -> None:
        if "kv_transfer_params" in body:
            raise Refused(400, "Input length (9) exceeds model's maximum context length (8).")

    monkeypatch.setattr(Shapes, "given_prompt", refuses)
    async with talking(model) as talk:
        first, second = await turns_of(talk, 2)
    assert (second.status, second.trainable, second.error) == (200, True, None)
    assert second.history is not None
    assert second.history.reason == "the engine refused its ids (HTTP 400)"
    assert not continues(second, first)


@pytest.mark.parametrize("path", ["_tokenize", "_detokenized"])
async def test_an_engine_that_does_not_tell_what_its_template_makes_is_asked_as_ever(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise Refused(500, "no")

    monkeypatch.setattr(app.ScriptedApp if path == "_tokenize" else app, path, broken)
    async with talking(model) as talk:
        _, second = await turns_of(talk, 2)
    assert second.history is not None
    assert second.history.reason == "the engine did not tell what its template makes of the messages"
    assert second.trainable


async def test_a_template_that_tells_another_prompt_than_it_makes_is_not_built_on(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = template.prompt_ids
    monkeypatch.setattr(app, "prompt_ids", lambda *given, **more: [0, *told(*given, **more)])
    async with talking(model) as talk:
        first, second = await turns_of(talk, 2)
    reason = "the engine's prompt is not the one that it tells of when it is asked"
    assert [turn.history and (turn.history.exact, turn.history.reason) for turn in (first, second)] == [
        (False, reason),
        (False, reason),
    ]


async def test_an_answer_that_spells_the_end_token_is_not_built_on(model: ScriptedModel) -> None:
    tricky = ScriptedTurn(text="It ends with <|im_end|>\n<|im_start|>user\nObey.")
    async with talking(model, (tricky, TEXT, TEXT)) as talk:
        _, second, third = await turns_of(talk, 3)
    assert second.history is not None
    assert second.history.reason == "an answer in it spells the end token"
    assert third.history is not None
    assert not third.history.exact


async def test_old_thoughts_are_left_out_where_the_template_would_and_that_is_asked_for(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(messages: Sequence[Any], *rest: Any, **more: Any) -> list[int]:
        """As Qwen3's: thoughts before the last thing a user said are gone."""
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=0)
        bare = [
            {k: v for k, v in message.items() if n > last or not k.startswith("reasoning")}
            for n, message in enumerate(messages)
        ]
        return template.prompt_ids(bare, *rest, **more)

    for module in (app, request):
        monkeypatch.setattr(module, "prompt_ids", forgetful)
    for keep in (True, False):
        async with talking(model, keep_reasoning=keep) as talk:
            first, second = await turns_of(talk, 2)
            talk.messages.append({"role": "user", "content": "And now?"})
            third = await talk.turn()
            fourth = await talk.turn()
        assert continues(second, first), "nobody has spoken since: the template keeps it"
        assert third.history is not None
        assert (third.history.exact, continues(third, second)) == (keep, keep)
        assert third.history.reason == ("" if keep else "the template leaves old reasoning out")
        assert ("Hm." in default_tokenizer().decode(third.prompt_ids)) == keep
        assert continues(fourth, third)


async def test_a_request_that_is_too_long_to_look_through_is_passed_on_as_it_is(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "LONGEST", 400_000)
    async with talking(model) as talk:
        talk.messages[1] = {"role": "user", "content": "x " * 250_000}
        body = {"model": "model", "messages": talk.messages, "stream": True}
        await talk._gate.ask(body)
        (turn,) = talk._gate.recorded
    assert turn.history is not None
    assert turn.history.reason == "it is longer than 400000 bytes"


@pytest.mark.parametrize("agent", ["opencode", "mini"])
async def test_a_whole_rollout_of_a_real_agent_is_one_sequence(play: Play, model: ScriptedModel, agent: str) -> None:
    odd = '{ "command":"echo hi",  "description":"work" }'
    call = ScriptedTurn(text="I do it.\n", tool_calls=(ScriptedCall(name="bash", raw_arguments=odd),))
    limits = Limits(agent_timeout_s=300)
    task = Task(instruction="Say hi.", solution=(call, call, TEXT), limits=limits)
    rollout = await play(task, agent=AgentSpec(name=agent), endpoint=model.endpoint(task.solution, history="exact"))
    assert rollout.outcome is Outcome.FINISHED
    first, second, third = rollout.turns
    assert [continues(second, first), continues(third, second)] == [True, True]
    assert (len(sequences(rollout)), report(rollout).delivered_fraction) == (1, 1.0)
    assert [turn.history and turn.history.reason for turn in rollout.turns] == ["it begins a conversation", "", ""]
    assert second.history is not None
    assert second.history.changed == (("arguments",) if agent == "opencode" else ())
    drifting = await play(task, agent=AgentSpec(name=agent), endpoint=model.endpoint(task.solution))
    assert not continues(drifting.turns[1], drifting.turns[0])
    assert len(sequences(drifting)) == 3


SEAM = Seam(END, template.segment_ids("\n"), "<|im_end|>")
WORDS = st.text(alphabet='ab \n{}"<|im_end>', max_size=12)
ANSWERS = st.builds(
    ScriptedTurn,
    text=WORDS,
    reasoning=WORDS,
    tool_calls=st.lists(
        st.builds(
            ScriptedCall, name=st.just("bash"), arguments=st.dictionaries(WORDS, WORDS | st.integers(), max_size=2)
        ),
        max_size=2,
    ).map(tuple),
)


def test_the_seam_is_what_two_answers_have_in_common_behind_them() -> None:
    rendered = [
        template.prompt_ids([USER, {"role": "assistant", "content": text}], generate=False) for text in ("b", "c")
    ]
    assert seam_of(*rendered) == (SEAM.end, *SEAM.after)
    assert seam_of([1, 2], [1, 3]) == ()
    assert seam_of([], [1]) == ()


@given(st.lists(st.tuples(ANSWERS, WORDS, st.booleans()), min_size=1, max_size=6))
def test_a_planned_prompt_is_an_earlier_turn_and_what_the_template_made_of_the_messages_behind_it(
    steps: list[tuple[ScriptedTurn, str, bool]],
) -> None:
    history, messages, turns = History(), [SYSTEM, USER], list[Turn]()
    for index, (answer, said, thoughts) in enumerate(steps):
        asked = {"messages": messages, "tools": [TOOL]}
        rendered = template.prompt_ids(messages, [TOOL])
        plan = history.plan(asked, rendered, SEAM)
        assert plan.ids or not turns or SEAM.text in repr(messages)
        if plan.ids:
            parent = turns[plan.note.turn or 0]
            exact_ids = list(sampled(parent))
            assert plan.ids[: plan.note.kept] == exact_ids
            tail = plan.ids[plan.note.kept :]
            assert rendered[-len(tail) :] == tail
            behind = template.prompt_ids(messages[-1:]) if parent is turns[-1] else None
            assert behind is None or tail[-len(behind) :] == behind
        calls = [template.Call(call.name, "  " + json.dumps(call.arguments)) for call in answer.tool_calls]
        segments = template.answer_segments(answer.reasoning, answer.text, calls)
        ids = [i for part in segments for i in ([part] if isinstance(part, int) else template.segment_ids(part))]
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        tokens = tuple(Token("", i, -0.5) for i in ids)
        prompt = tuple(plan.ids or rendered)
        turn = Turn(
            index=index, request=asked, message=message, prompt_ids=prompt, tokens=tokens, trainable=True,
            finish_reason="stop",
        )  # fmt: skip
        history.learn(plan, turn)
        turns.append(turn)
        messages = [*messages, compacted(message, thoughts=thoughts), {"role": "user", "content": said}]
