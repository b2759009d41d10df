"""A rollout as the outside world reads it: one JSON shape, by the names that published clients know."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollcage.events import AgentEmitted
from rollcage.results.fold import Rollout, Verdict
from rollcage.types import Blame, CommandResult, JsonObject, Outcome, Trust, Turn, Value

TAIL_EVENTS, TAIL = 64, 8000
"""Events and characters that `agent_log_tail` has at most."""


class CommandOutcome(Value):
    """One setup or verify command."""

    cmd: str
    """The shell text."""
    exit_code: int
    """124 where its time ran out, 128+n where signal n killed it."""
    stdout: str = ""
    """The end of what it printed."""
    stderr: str = ""
    """The end of what it complained about."""
    duration_s: float = 0.0
    """Wall time."""


class ProxyTurn(Value):
    """One model call. The three completion lists are each as long as the answer, or empty."""

    turn: int
    """Order of arrival, from 0."""
    purpose: str = "agent"
    """`agent`, `title`, `compaction` or `subagent`."""
    session_id: str = ""
    """The agent's own session id."""
    parent_session_id: str = ""
    """The session that started this one."""
    finish_reason: str | None = None
    """Why generation ended; null for a turn that was cut."""
    prompt_token_ids: list[int] = []
    """The engine's own ids of the whole prompt; empty where the turn cannot be trained on."""
    completion_tokens: list[str] = []
    """Text of each sampled token; empty where the engine did not tell all that it counted."""
    completion_token_ids: list[int] = []
    """Id of each sampled token; empty where the turn cannot be trained on."""
    per_token_logps: list[float] = []
    """Logprob of each sampled token; empty where the turn cannot be trained on."""
    request: JsonObject = {}
    """The request body as it was sent upstream."""
    message: JsonObject = {}
    """The assistant message."""
    usage: JsonObject = {}
    """The engine's own count."""
    latency_s: float = 0.0
    """Seconds from the agent's request to the end of the answer."""
    ttft_s: float | None = None
    """Seconds until the first token."""
    timestamp: float = 0.0
    """Unix time at which the request had arrived."""
    upstream_status: int = 0
    """HTTP status of the answer; 0 where none came."""
    upstream_error: str | None = None
    """What broke, in one line."""
    trainable: bool = False
    """Ids and logprobs are complete and agree with the engine's own count; where not, their lists are empty."""
    untrainable_reason: str = ""
    """Why not, where not."""
    recorded: bool = False
    """Whether this answer was given before, to the rollout that this one is a replay or a fork of."""
    replaces: int | None = None
    """The broken attempt that this call repeats: that one is not to be trained on."""
    policy_version: str = ""
    """The weights that were asked, as the caller names them."""
    sampling: JsonObject = {}
    """How the engine was told to sample; what is not named was left to it."""


class SuspicionFound(Value):
    """Something the agent left that could have decided the result, had verification looked at it."""

    kind: str
    """A stable word for programs: `planted_file`, `changed_outside`, ...; empty in logs of before there were such."""
    paths: list[str] = []
    """Where, all of it."""
    what: str
    """The same in words."""


class VerdictFound(Value):
    """What judging the stored work again came to (`rollcage reverify`)."""

    rollout_id: str
    """The rollout in whose log this verification is told."""
    time: float
    """Unix time of its end."""
    reward: float | None
    """What it would have earned; null where this verification broke."""
    reward_parts: dict[str, float] = {}
    """Named parts of it."""
    trust: Trust | None = None
    """How far it can be trusted."""
    outcome: Outcome
    """How this verification ended."""
    error: str | None = None
    """`Kind: message`; null where nothing broke."""
    error_code: str | None = None
    """A stable word for programs."""
    blame: Blame | None = None
    """Whose fault it is that there is no reward."""
    changed: list[str] = []
    """The fields of the task that were not as they had been."""


class RolloutResult(Value):
    """What a rollout came to."""

    task_id: str = ""
    """The caller's own name for the task."""
    rollout_id: str = ""
    """Names this rollout in the log."""
    sandbox_id: str = ""
    """The box it ran in."""
    reward: float | None = None
    """What it earned; null where nothing was scored."""
    agent_exit_code: int | None = None
    """The agent's own exit code; null where it never ended by itself."""
    exit_code: int | None = None
    """The same, by its older name."""
    wall_s: float = 0.0
    """Seconds from the start to the end of everything."""
    mode: str = "transparent_proxy"
    """Whether the agent's calls were recorded."""
    setup_results: list[CommandOutcome] = []
    """The setup commands that ran."""
    verify_results: list[CommandOutcome] = []
    """The verify commands that ran."""
    proxy_turns: list[ProxyTurn] = []
    """Every model call."""
    files: dict[str, str] = {}
    """What the agent left in the workdir: `{path in the box: text}`."""
    files_extra: list[str] = []
    """Paths that were not collected."""
    workdir_files: dict[str, str] = {}
    """The same as `files`, by its older name."""
    agent_log_tail: str = ""
    """The end of the agent's own stream of events: JSON lines, the last one last."""
    proxy_log_tail: str = ""
    """What went wrong between the agent and the model, one line per broken call."""
    install_log_tail: str = ""
    """What the box could not offer, one line each."""
    verifier_stdout: str = ""
    """What the test script printed."""
    verifier_stderr: str = ""
    """What the test script complained about."""
    test_exit_code: int | None = None
    """The test script's exit code; null where there was none."""
    error: str | None = None
    """`Kind: message`; null where nothing broke."""
    error_code: str | None = None
    """A stable word for programs."""
    outcome: Outcome | None = None
    """How it ended; null while it runs."""
    timings: dict[str, float] = {}
    """Seconds by stage, and in total."""
    files_extra_why: dict[str, str] = {}
    """Why each of them was not: `binary`, `symlink`, `too large (123 bytes)`, ..."""
    patch: str | None = None
    """What the agent changed in the workdir, as `git diff` writes it; null where that cannot be told."""
    reward_parts: dict[str, float] = {}
    """Named parts of the reward, from `reward.json`."""
    patch_truncated: bool = False
    """The patch was longer than is kept; its text ends at a whole line."""
    group_id: str = ""
    """As the caller gave it."""
    policy_version: str = ""
    """As the caller gave it."""
    metadata: JsonObject = {}
    """As the caller gave it."""
    suspicions: list[SuspicionFound] = []
    """What the agent left that could have decided the result, had verification looked at it."""
    instruction: str = ""
    """The prompt that the agent got."""
    model: str = ""
    """The model's name."""
    agent: str = ""
    """The agent CLI."""
    agent_version: str = ""
    """Its version, where it ran."""
    sampling: JsonObject = {}
    """How the model was to sample, as far as the caller said; each turn has what was really sent."""
    trust: Trust | None = None
    """How far the reward can be trusted: `isolated`, `in_process` or `shared`; null where there is none."""
    blame: Blame | None = None
    """Whose fault it is that there is no reward: `agent` (count it as 0), `task` or `infrastructure`; null where there
    is one, or nobody is to blame."""
    verdicts: list[VerdictFound] = []
    """What judging the stored work again came to, oldest first; `reward` stays the first verdict."""
    reverifies: str = ""
    """The rollout whose stored work this one judged again; empty where it is a rollout of its own."""
    work_kept: bool = False
    """Whether the agent's work is stored, so that `rollcage reverify` can judge it again."""
    agent_stderr_tail: str = ""
    """The end of the agent's diagnostic log, which it prints to stderr."""


def result_of(rollout: Rollout) -> RolloutResult:
    """The rollout in the shape that published clients read."""
    verify, test = _split(rollout)
    workdir = rollout.job.task.workdir
    files = {f"{workdir}/{path}": text for path, text in rollout.files.items()}
    return RolloutResult(
        task_id=rollout.job.task.id,
        rollout_id=rollout.id,
        sandbox_id=rollout.sandbox_id,
        reward=rollout.reward,
        agent_exit_code=rollout.agent_exit_code,
        exit_code=rollout.agent_exit_code,
        wall_s=rollout.timings.get("total", 0.0),
        mode=rollout.job.mode,
        setup_results=[_command(result) for result in rollout.setup],
        verify_results=[_command(result) for result in verify],
        proxy_turns=[proxy_turn(turn) for turn in rollout.turns],
        files=files,
        files_extra=[f"{workdir}/{path}" for path in rollout.files_extra],
        files_extra_why={f"{workdir}/{path}": why for path, why in rollout.files_why.items()},
        reward_parts=rollout.reward_parts,
        patch=rollout.patch,
        patch_truncated=rollout.patch_truncated,
        workdir_files=files,
        agent_log_tail=_log_tail(rollout.agent_events),
        proxy_log_tail="\n".join(f"turn {turn.index + 1}: {turn.error}" for turn in rollout.turns if turn.error),
        install_log_tail="\n".join(rollout.notes),
        verifier_stdout=test.stdout if test else "",
        verifier_stderr=test.stderr if test else "",
        test_exit_code=test.exit_code if test else None,
        error=rollout.error,
        error_code=rollout.error_code,
        outcome=rollout.outcome,
        timings=rollout.timings,
        group_id=rollout.job.group_id,
        policy_version=rollout.job.policy_version,
        metadata=rollout.job.metadata,
        suspicions=[
            SuspicionFound(kind=each.code, paths=list(each.paths), what=each.what) for each in rollout.suspicions
        ],
        trust=rollout.trust,
        blame=rollout.blame,
        verdicts=[_verdict(verdict) for verdict in rollout.verdicts],
        reverifies=rollout.reverifies,
        work_kept=bool(rollout.work and rollout.work.digest),
        instruction=rollout.job.task.instruction,
        model=rollout.job.model.model,
        agent=rollout.job.agent.name,
        agent_version=rollout.agent_version,
        sampling=rollout.job.model.sampling.model_dump(mode="json", exclude_none=True),
        agent_stderr_tail=rollout.agent_stderr_tail,
    )


def _verdict(verdict: Verdict) -> VerdictFound:
    score = verdict.reward
    return VerdictFound(
        reward=score.total if score else None,
        reward_parts=score.parts if score else {},
        trust=score.trust if score else None,
        changed=list(verdict.changed),
        **{name: getattr(verdict, name) for name in _SAME},
    )


_SAME = ("rollout_id", "time", "outcome", "error", "error_code", "blame")


def _log_tail(said: Sequence[AgentEmitted]) -> str:
    """The last events, whole, one JSON line each; of a single one that is too long only its end."""
    tail = ""
    for emitted in reversed(said[-TAIL_EVENTS:]):
        raw = emitted.event.model_dump(mode="json") if emitted.raw is None else emitted.raw
        line = f"{json.dumps(raw)}\n"
        if len(line) + len(tail) > TAIL:
            return tail or line[-TAIL:]
        tail = line + tail
    return tail


def _split(rollout: Rollout) -> tuple[tuple[CommandResult, ...], CommandResult | None]:
    """The verify commands, and the test script's run, which comes after all of them."""
    count = len(rollout.job.task.verify)
    if rollout.job.task.test_script and len(rollout.verify) > count:
        return rollout.verify[:count], rollout.verify[-1]
    return rollout.verify, None


def _command(result: CommandResult) -> CommandOutcome:
    return CommandOutcome(
        cmd=result.command,
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        duration_s=result.seconds,
    )


def proxy_turn(turn: Turn) -> ProxyTurn:
    """One model call in the shape that published clients read. Half a record is not handed out as if it were whole."""
    tokens = turn.tokens if turn.trainable else ()
    # OpenAI tells the tokens of a text and not those of a tool call beside it.
    counted = turn.usage.get("completion_tokens")
    whole = turn.trainable or not isinstance(counted, int) or counted == len(turn.tokens)
    return ProxyTurn(
        turn=turn.index,
        purpose=turn.purpose.value,
        session_id=turn.session,
        parent_session_id=turn.parent_session,
        finish_reason=turn.finish_reason,
        prompt_token_ids=list(turn.prompt_ids) if turn.trainable else [],
        completion_tokens=[token.text for token in turn.tokens] if whole else [],
        completion_token_ids=[token.id for token in tokens if token.id is not None],
        per_token_logps=[token.logprob for token in tokens if token.logprob is not None],
        request=turn.request,
        message=turn.message,
        usage=turn.usage,
        latency_s=turn.seconds,
        ttft_s=turn.first_token_s,
        timestamp=turn.started_at,
        upstream_status=turn.status,
        upstream_error=turn.error,
        trainable=turn.trainable,
        untrainable_reason=turn.untrainable_reason,
        recorded=turn.recorded,
        replaces=turn.replaces,
        policy_version=turn.policy_version,
        sampling=turn.sampling,
    )
