"""A rollout as the outside world reads it: one JSON shape, by the names that published clients know."""

from __future__ import annotations

from rollcage.events import Rollout
from rollcage.types import CommandResult, JsonObject, Outcome, Turn, Value


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
    """The engine's own ids of the whole prompt; empty where it does not tell."""
    completion_tokens: list[str] = []
    """Text of each sampled token."""
    completion_token_ids: list[int] = []
    """Id of each sampled token; empty where the engine did not tell all of them."""
    per_token_logps: list[float] = []
    """Logprob of each sampled token; empty where the engine did not tell all of them."""
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
    """The end of what the agent printed to stderr."""
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


def result_of(rollout: Rollout) -> RolloutResult:
    """The rollout in the shape that published clients read."""
    verify, test = _split(rollout)
    workdir = rollout.job.task.workdir
    files = {f"{workdir}/{path}": text for path, text in rollout.files.items()}
    return RolloutResult(
        task_id=rollout.job.task.id,
        rollout_id=rollout.id,
        sandbox_id=rollout.sandbox_id,
        reward=rollout.reward.total if rollout.reward else None,
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
        reward_parts=rollout.reward.parts if rollout.reward else {},
        patch=rollout.patch,
        patch_truncated=rollout.patch_truncated,
        workdir_files=files,
        agent_log_tail=rollout.agent_log_tail,
        proxy_log_tail="\n".join(f"turn {turn.index}: {turn.error}" for turn in rollout.turns if turn.error),
        install_log_tail="\n".join(rollout.notes),
        verifier_stdout=test.stdout if test else "",
        verifier_stderr=test.stderr if test else "",
        test_exit_code=test.exit_code if test else None,
        error=rollout.error,
        error_code=rollout.error_code,
        outcome=rollout.outcome,
        timings=rollout.timings,
    )


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
    """One model call in the shape that published clients read."""
    ids = [token.id for token in turn.tokens if token.id is not None]
    logprobs = [token.logprob for token in turn.tokens if token.logprob is not None]
    count = len(turn.tokens)
    return ProxyTurn(
        turn=turn.index,
        purpose=turn.purpose.value,
        session_id=turn.session,
        parent_session_id=turn.parent_session,
        finish_reason=turn.finish_reason,
        prompt_token_ids=list(turn.prompt_ids),
        completion_tokens=[token.text for token in turn.tokens],
        completion_token_ids=ids if len(ids) == count else [],
        per_token_logps=logprobs if len(logprobs) == count else [],
        request=turn.request,
        message=turn.message,
        usage=turn.usage,
        latency_s=turn.seconds,
        ttft_s=turn.first_token_s,
        timestamp=turn.started_at,
        upstream_status=turn.status,
        upstream_error=turn.error,
    )
