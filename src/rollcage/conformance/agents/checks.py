"""What every agent must hold. Most checks look at one rollout from different sides: starting an agent is dear."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from rollcage.conformance.agents.subject import LINGER, PROBE, PROMPT, WORKDIR, Need, Played, Subject, without_builds
from rollcage.conformance.sandboxes.values import NotApplicable, expect, same
from rollcage.errors import UsageError
from rollcage.sandboxes.base import sh
from rollcage.types import AgentSpec, Endpoint, JsonObject, Limits, Outcome, Purpose, SandboxSpec, ScriptedTurn

Trial = Callable[[Subject], Awaitable[None]]
LARGE = "\ufeff" + "".join(f"line {number}: the whole prompt arrives, \u00e4 \u4e16\n" for number in range(2700))
"""More than 100 kB, and less than what one argument may hold; before it a byte order mark."""
COMMANDS = ("/help is how it begins.", "@/etc/hostname is a file, and ann@example.com is not.\n")
"""What many take for commands, or put files into, where people type it."""
SYSTEM = "--help: you are on trial. {{ braces }}, {% endraw %} and $variables stay as they are."
DELEGATED = "Look around, and tell what you saw: 2718281828."
"""What a subagent is asked."""
ABORT_S = 2.0
TOKEN_S = 0.01


@dataclass(frozen=True)
class AgentCheck:
    """One thing that must hold of every agent."""

    name: str
    holds: str
    """What must hold, in one sentence."""
    run: Trial
    """Returns where it holds, raises where it does not."""
    needs: tuple[Need, ...] = ()
    """Without these, an agent is not tried."""


CHECKS: list[AgentCheck] = []


def _check(name: str, holds: str, *, needs: tuple[Need, ...] = ()) -> Callable[[Trial], Trial]:
    def decorate(trial: Trial) -> Trial:
        CHECKS.append(AgentCheck(name, holds, trial, needs))
        return trial

    return decorate


@_check("install.layers", "its layers are built, or are there", needs=("box",))
async def _layers(subject: Subject) -> None:
    spec = SandboxSpec(backend=subject.provider.name, template=subject.template)
    async with subject.provider.open(spec, subject.agent.layers()) as box:
        same((await sh(box, "true")).code, 0, "a command in its box")


@_check("install.once", "a second box is opened from what was built: nothing is fetched or built again", needs=("box",))
async def _once(subject: Subject) -> None:
    spec = SandboxSpec(backend=subject.provider.name, template=subject.template)
    async with subject.provider.open(spec, without_builds(subject.agent.layers())) as box:
        same((await sh(box, "true")).code, 0, "a command in its box")


def _well(played: Played) -> None:
    expect(played.rollout.outcome is Outcome.FINISHED, f"it ended so: {played.ended}")


@_check("run.finishes", "without network it works to its end, its exit code is 0, and the reward is that of its work")
async def _finishes(subject: Subject) -> None:
    played = await subject.usual()
    _well(played)
    same(played.rollout.agent_exit_code, 0, "exit code")
    same(played.rollout.reward, 0.0 if subject.lacks(("work",)) else 1.0, "reward")


@_check(
    "run.no_egress",
    "nothing of it tries to reach the network: no packet without a route, no name looked up",
    needs=("box",),
)
async def _no_egress(subject: Subject) -> None:
    played = await subject.usual()
    _well(played)
    if played.egress is None:
        raise NotApplicable("the boxes of this backend do not count it")
    same(played.egress, 0, "attempts to reach the network")


@_check(
    "prompt.verbatim",
    "the prompt reaches the model as it is: leading dashes, many scripts, blanks at its ends",
    needs=("model",),
)
async def _verbatim(subject: Subject) -> None:
    played = await subject.usual()
    expect(_told(played, PROMPT), f"the prompt is not in the first request as it was given ({played.ended})")


@_check("prompt.large", "a prompt of 100 kB reaches the model whole, in one piece", needs=("model",))
async def _large(subject: Subject) -> None:
    expect(len(LARGE.encode()) > 100_000, "the prompt is not large")
    played = await _configured(subject)
    expect(_told(played, LARGE), f"the prompt is not in the first request as it was given ({played.ended})")


@_check(
    "prompt.commands",
    "one that begins as a command, or names files, reaches the model as well, in the one call that one answer takes",
    needs=("model",),
)
async def _commands(subject: Subject) -> None:
    for words in COMMANDS:
        played = await subject.play(words, subject.script())
        _well(played)
        expect(_told(played, words), f"{words!r} is not in the first request as it was given")
        same(len(played.rollout.turns), 1, "model calls")


@_check(
    "turns.trainable",
    "every turn is the agent's own and trainable, with prompt ids, and there are no others",
    needs=("model",),
)
async def _trainable(subject: Subject) -> None:
    played = await subject.usual()
    _well(played)
    turns = played.rollout.turns
    same(len(turns), 4 if subject.words.edit else 3, "model calls")
    for turn in turns:
        same(turn.purpose, Purpose.AGENT, f"purpose of turn {turn.index}")
        expect(turn.trainable and turn.prompt_ids and turn.tokens, f"turn {turn.index}: {turn.untrainable_reason}")


@_check(
    "turns.subagents",
    "the calls of a subagent are told apart: in a session of its own, with its parent's",
    needs=("model",),
)
async def _subagents(subject: Subject) -> None:
    delegate = subject.words.delegate
    if delegate is None:
        raise NotApplicable("it has no subagents")
    # A conversation is answered by how long it is: a subagent too begins by asking for one, as far as it may.
    script = [ScriptedTurn(text="I ask.", tool_calls=(delegate(DELEGATED),)), *subject.script("true")]
    played = await subject.play("Have it looked at.", script)
    _well(played)
    turns = played.rollout.turns
    theirs = [turn for turn in turns if DELEGATED in json.dumps(_opening(turn.request))]
    own = [turn for turn in turns if turn not in theirs]
    expect(bool(theirs and own), f"{len(theirs)} of {len(turns)} calls are a subagent's")
    same({turn.purpose for turn in own}, {Purpose.AGENT}, "purposes of its own calls")
    same({turn.purpose for turn in theirs}, {Purpose.SUBAGENT}, "purposes of its subagents' calls")
    same(len({turn.session for turn in own}), 1, "sessions of its own")
    same({turn.parent_session for turn in own}, {""}, "parents of its own session")
    main, sessions = own[0].session, {turn.session for turn in turns}
    expect(bool(main) and main not in {turn.session for turn in theirs}, "a subagent is in the session of its parent")
    for turn in theirs:
        expect(turn.parent_session in sessions - {turn.session}, f"turn {turn.index} has no parent among the sessions")
    expect(main in {turn.parent_session for turn in theirs}, "no subagent is the main session's")


def _opening(request: JsonObject) -> list[JsonObject]:
    """The messages before the model's first."""
    messages = request.get("messages", [])
    return list(itertools.takewhile(lambda message: message.get("role") != "assistant", messages))


@_check("tools.run", "a command is run in the box, and the model is told what came of it", needs=("model",))
async def _run(subject: Subject) -> None:
    played = await subject.usual()
    _well(played)
    expect(PROBE in played.told, f"the model was told: {played.told[-300:]}")


@_check("tools.edit", "its own tool for files writes one", needs=("model",))
async def _edit(subject: Subject) -> None:
    if subject.words.edit is None:
        raise NotApplicable("it has no tool of its own for files")
    played = await subject.usual()
    _well(played)
    path = f"{WORKDIR}/edited.txt"
    found = [edit for call in played.calls for edit in call.edits if edit.path.endswith("edited.txt")]
    same([edit.added for edit in found], ["by its own tool\n"], f"edits of {path} in its events")
    content = played.rollout.files.get("edited.txt", played.rollout.files.get(path))
    same(content, "by its own tool\n", "the file")


@_check(
    "events.complete",
    "its events tell every word of the model's and every call with its result, in neutral words",
    needs=("work",),
)
async def _complete(subject: Subject) -> None:
    played = await subject.usual()
    _well(played)
    if subject.lacks(("model",)):
        expect(PROBE in played.told, "what its commands printed is in no event")
        return
    said = "\n".join(played.texts)
    for number in range(3 if subject.words.edit else 2):
        expect(f"Step {number}." in said, f"'Step {number}.' is not among what it said")
    expect("All is done." in said, "its last words are not among what it said")
    expect(all(call.ended for call in played.calls), "a call has no end")
    expect(any(PROBE in call.result for call in played.calls), "the result of a command is in no event")


@_check(
    "end.model_error",
    "where its model fails, its exit code is not 0, and the rollout says that it was the model",
    needs=("model",),
)
async def _model_error(subject: Subject) -> None:
    played = await subject.play("Try.", [ScriptedTurn(status=404, text="no such model")])
    expect(played.rollout.agent_exit_code not in (0, None), f"exit code {played.rollout.agent_exit_code}")
    same(played.rollout.outcome, Outcome.MODEL_UNREACHABLE, "outcome")


@_check("end.limit", "where a limit is reached, it ends by itself, and the rollout names the limit", needs=("model",))
async def _limit(subject: Subject) -> None:
    script = subject.script("true", "true", "true")
    played = await subject.play("Go on.", script, limits=Limits(max_turns=1))
    same(played.rollout.outcome, Outcome.LIMIT_REACHED, "outcome")
    expect(played.rollout.agent_exit_code not in (0, None), f"exit code {played.rollout.agent_exit_code}")


@_check("end.children", "what it started in the background is dead when it has ended", needs=("box", "work"))
async def _children(subject: Subject) -> None:
    played = await subject.usual()
    _well(played)
    same(played.left_alive, "", "processes that are still there")


@_check(
    "end.abort",
    f"aborted while its model speaks, that one falls silent and it is gone within {ABORT_S:g} s",
    needs=("model",),
)
async def _abort(subject: Subject) -> None:
    model, began, at_abort = subject.model, 0.0, 0
    # The model's own clock, which a busy machine slows as well.
    most = round(ABORT_S / TOKEN_S)

    async def abort(scope: anyio.CancelScope, endpoint: Endpoint) -> None:
        nonlocal began, at_abort
        while model.generated(endpoint) < 5:  # noqa: ASYNC110 - it has no event to wait for
            await anyio.sleep(0.01)
        began, at_abort = time.monotonic(), model.generated(endpoint)
        scope.cancel()

    speaks = [ScriptedTurn(text="and so on " * 20_000, token_delay_s=TOKEN_S)]
    played = await subject.play("Think.", speaks, while_running=abort, limits=Limits(max_tokens_cap=0))
    took = time.monotonic() - began
    same(played.rollout.outcome, Outcome.ABORTED, "outcome")
    while model.open_requests and model.generated(played.endpoint) - at_abort <= most:  # noqa: ASYNC110 - as above
        await anyio.sleep(0.01)
    went_on = model.generated(played.endpoint) - at_abort
    expect(went_on <= most, f"its model went on for {went_on} chunks, one in {TOKEN_S:g} s")
    same(model.open_requests, 0, "requests that the model still answers")
    expect(took <= ABORT_S * subject.pace, f"it took {took:.2f} s")


@_check("secrets.none", "the real key of the model is in none of its files, events or requests")
async def _secrets(subject: Subject) -> None:
    played = await subject.usual()
    _well(played)
    same(played.holding_key, "", "files with the key")
    key, rollout = played.endpoint.key.get_secret_value(), played.rollout
    expect(key not in "".join(one.model_dump_json() for one in rollout.agent_events), "an event has the key in it")
    expect(key not in json.dumps([turn.request for turn in rollout.turns]), "a request has the key in it")


@_check("config.system_prompt", "a system prompt of the job's reaches the model as it is, or is refused by name")
async def _system_prompt(subject: Subject) -> None:
    _refused(subject, "system_prompt", SYSTEM)
    expect(_told(await _configured(subject), SYSTEM), "it is not in the first request")


@_check("config.env", "variables of the job's are in the environment of its commands")
async def _env(subject: Subject) -> None:
    _refused(subject, "env", {"ROLLCAGE_PROBE": "probe-7"})
    played = await _configured(subject)
    _well(played)
    expect("probe-7" in played.told, "a command did not see it")


@_check("config.tools", "a tool that the job disables is not offered to the model, or that is refused by name")
async def _tools(subject: Subject) -> None:
    _refused(subject, "disabled_tools", _spare(subject) or ("bash",))
    spare = set(_spare(subject))
    expect(spare & _offered(await subject.usual()), f"{', '.join(spare)} is not offered anyway")
    offered = _offered(await _configured(subject))
    expect(offered and not spare & offered, f"{', '.join(spare & offered)} is offered all the same")


def _offered(played: Played) -> set[str]:
    return {str(tool.get("function", {}).get("name")) for tool in played.first.get("tools", [])}


def _refused(subject: Subject, field: str, value: object) -> None:
    try:
        subject.agent.check(AgentSpec(name=subject.agent.name, **{field: value}))
    except UsageError as error:
        expect(error.argument in (field, "agent"), f"what is refused is not named: {error}")
        raise NotApplicable(f"refused: {error}") from None


async def _configured(subject: Subject) -> Played:
    """A rollout with everything set that it takes, and the large prompt; played once."""
    if subject.configured is None:
        spec: dict[str, object] = {}
        wanted = {"env": {"ROLLCAGE_PROBE": "probe-7"}, "system_prompt": SYSTEM, "disabled_tools": _spare(subject)}
        for field, value in wanted.items():
            try:
                subject.agent.check(AgentSpec(name=subject.agent.name, **{field: value}))
            except UsageError:
                continue
            spec[field] = value
        script = subject.script(f'printf "%s" "$ROLLCAGE_PROBE"; {LINGER}')
        subject.configured = await subject.play(LARGE, script, spec=spec)
    return subject.configured


def _spare(subject: Subject) -> tuple[str, ...]:
    """Tools that can be left out; empty where it has none."""
    if subject.lacks(("model",)):
        return ()
    words = subject.words
    return words.spare or ((words.edit("", "").name,) if words.edit else ())


def _told(played: Played, words: str) -> bool:
    """Whether the first request has these words in one piece."""
    for message in played.first.get("messages", []):
        content = message.get("content")
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or []]
        if any(words in part for part in parts):
            return True
    return False
