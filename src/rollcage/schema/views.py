"""What the server says about rollouts: one value per answer, shared by HTTP, MCP and OpenEnv."""

from __future__ import annotations

from typing import Any, Literal

from rollcage.events import Entry
from rollcage.results.result import ProxyTurn, proxy_turn
from rollcage.types import JsonObject, Outcome, Stage, Standing, Turn, Value

Status = Literal["queued", "starting", "running", "verifying", "done", "unknown"]
"""Where a rollout is, in the words of published clients."""

STATUS: dict[Stage, Status] = {
    Stage.QUEUED: "queued",
    Stage.PROVISION: "starting",
    Stage.SETUP: "starting",
    Stage.AGENT: "running",
    Stage.VERIFY: "verifying",
    Stage.ENDED: "done",
}


class Started(Value):
    """A rollout was accepted."""

    rollout_id: str
    """Names it from now on."""
    task_id: str = ""
    """The caller's own name for the task."""
    status: Status = "starting"
    """Where it is; `starting` for a new one, whatever place it has in the queue."""
    started_at: float
    """Unix time at which it was accepted."""
    joined: bool = False
    """Whether the idempotency key named a rollout that was there already: nothing was started."""


class RolloutState(Value):
    """Where a rollout is; cheap to ask for."""

    rollout_id: str
    """Names it."""
    task_id: str = ""
    """The caller's own name for the task."""
    status: Status
    """`queued`, `starting`, `running`, `verifying` or `done`; `unknown` where there is no such rollout."""
    stage: Stage | None = None
    """The stage of its log."""
    progress: str = ""
    """What it is doing in `provision` that takes a while (fetching, building), in words; empty where there is nothing
    to tell. The list of rollouts leaves it out."""
    queue_position: int | None = None
    """1 is the next to begin; null where it does not wait, or waits in another server."""
    serve_session_id: str | None = None
    """The agent's own session, once it told."""
    proxy_turns_so_far: int = 0
    """Model calls that are over."""
    tokens_so_far: int = 0
    """Tokens the model generated, as far as the engine told."""
    outcome: Outcome | None = None
    """How it ended; null while it runs."""
    reward: float | None = None
    """What it earned; null where nothing was scored."""
    standing: Standing | None = None
    """`running`, `passed`, `partial`, `failed`, `unscored` or `broken`."""
    error: str | None = None
    """`Kind: message`; null where nothing broke."""
    started_at: float | None = None
    """Unix time at which it was accepted."""
    finished_at: float | None = None
    """Unix time at which it ended."""
    agent: str = ""
    """The agent CLI."""
    model: str = ""
    """The model's name."""
    instruction: str = ""
    """The first 200 characters of the prompt."""


def unknown_state(rollout_id: str) -> RolloutState:
    """What the older shape answers for an id that nobody knows."""
    return RolloutState(rollout_id=rollout_id, status="unknown", error=f"unknown rollout_id: {rollout_id}")


class RolloutPage(Value):
    """Some rollouts, newest first."""

    rollouts: list[RolloutState]
    """At most as many as were asked for."""
    next_cursor: str | None = None
    """Give it as `cursor` to get those before; null at the end."""


class Message(Value):
    """One message of the agent's transcript, as OpenCode shapes it."""

    info: JsonObject
    """`id`, `sessionID`, `role` (`user`, `assistant`), and what the agent adds."""
    parts: list[JsonObject] = []
    """Text, reasoning, tool calls and steps, in order."""


class Messages(Value):
    """The agent's own transcript so far."""

    rollout_id: str
    """Names the rollout."""
    status: Status
    """Where it is."""
    serve_session_id: str | None = None
    """The agent's own session, once it told."""
    messages: list[Message] = []
    """Oldest first."""


class EventPage(Value):
    """Some entries of a rollout's log."""

    rollout_id: str
    """Names the rollout."""
    status: Status
    """Where it is."""
    events: list[Entry] = []
    """Oldest first."""
    next_after: int = 0
    """Give it as `after` to get what follows."""
    ended: bool = False
    """Whether nothing will follow."""
    sse: str = ""
    """Where the same events stream: `Last-Event-ID` resumes."""


class Aborted(Value):
    """The answer to a request to stop."""

    rollout_id: str
    """Names the rollout."""
    aborted: bool
    """Whether it will stop because of this; false where it had ended."""
    reason: str = ""
    """Why, in the caller's words, or why not."""


class TurnPage(Value):
    """Some model calls of a rollout."""

    rollout_id: str
    """Names the rollout."""
    turns: list[ProxyTurn] = []
    """Oldest first."""
    next_after: int | None = None
    """Give it as `after` to get what follows; null where there is nothing yet, or nothing more."""


class TracedTurn(Value):
    """One model call as trainers need it: rows of equal length, or empty ones where the engine did not tell."""

    turn: int
    """Order of arrival, from 0."""
    purpose: str
    """What the agent made this call for."""
    session_id: str = ""
    """The agent's own session."""
    replaces: int | None = None
    """The broken attempt that this call repeats."""
    prompt_token_ids: list[int] = []
    """The engine's own ids of the whole prompt."""
    completion_token_ids: list[int] = []
    """Id of each sampled token."""
    per_token_logps: list[float] = []
    """Logprob of each sampled token."""
    loss_mask: list[int] = []
    """0 for each token of the prompt, then 1 for each sampled one; empty where the turn cannot be trained on."""
    finish_reason: str | None = None
    """Why generation ended."""
    trainable: bool = False
    """Ids and logprobs are complete and agree with the engine's own count."""
    untrainable_reason: str = ""
    """Why not, where not."""
    policy_version: str = ""
    """The weights that were asked, as the caller names them."""
    sampling: JsonObject = {}
    """How the engine was told to sample; what is not named was left to it."""


class Trace(Value):
    """A rollout token by token."""

    rollout_id: str
    """Names the rollout."""
    reward: float | None = None
    """What it earned; null where nothing was scored."""
    outcome: Outcome | None = None
    """How it ended; null while it runs."""
    turns: list[TracedTurn] = []
    """In order of arrival."""
    next_after: int | None = None
    """Give it as `after` to get what follows; null at the end."""
    raw: str = ""
    """Where the whole turns are: requests, messages, alternatives."""


def traced(turn: Turn) -> TracedTurn:
    """One model call as trainers need it."""
    whole = proxy_turn(turn)
    mask = [0] * len(whole.prompt_token_ids) + [1] * len(whole.completion_token_ids)
    return TracedTurn(
        turn=turn.index,
        purpose=turn.purpose.value,
        session_id=turn.session,
        replaces=turn.replaces,
        prompt_token_ids=whole.prompt_token_ids,
        completion_token_ids=whole.completion_token_ids,
        per_token_logps=whole.per_token_logps,
        loss_mask=mask,
        finish_reason=turn.finish_reason,
        trainable=turn.trainable,
        untrainable_reason=turn.untrainable_reason,
        policy_version=turn.policy_version,
        sampling=whole.sampling,
    )


class Files(Value):
    """What the agent left in the workdir."""

    rollout_id: str
    """Names the rollout."""
    files: dict[str, str] = {}
    """`{path: text}`."""
    files_extra: list[str] = []
    """Paths that were not collected."""


class Problem(Value):
    """What every refused request gets."""

    error: str
    """What was wrong and what to do."""
    error_code: str
    """A stable word for programs."""
    argument: str | None = None
    """The argument that was wrong, where it was one."""


class Health(Value):
    """The server answers."""

    status: Literal["healthy", "degraded"] = "healthy"
    """`degraded` where it answers and cannot write its log: nothing can be started."""
    problem: str = ""
    """What is wrong."""
    version: str = ""
    """Of rollcage."""
    running: int = 0
    """Rollouts that have a place."""
    waiting: int = 0
    """Rollouts that wait for one."""


class Readiness(Value):
    """Whether the server takes rollouts now."""

    ready: bool
    """False while it stops, or cannot write its log."""
    problem: str = ""
    """Why not."""


class OfferedEnvironment(Value):
    """A remote environment that this server can reach."""

    name: str
    """What rollouts name it by (`environment`)."""
    kind: str
    """`fleet`, `openenv` or `mcp`."""
    version: str = ""
    """Its version, where it tells."""
    description: str = ""
    """What it says of itself."""


class OfferedEnvironments(Value):
    """The remote environments of this server."""

    environments: list[OfferedEnvironment] = []
    """All that could be found."""
    problem: str = ""
    """Why some may be missing."""


class OfferedTool(Value):
    """One tool of a remote environment."""

    name: str
    """What it is called by."""
    description: str = ""
    """What it says of itself."""
    input_schema: JsonObject = {}
    """JSON Schema of its arguments."""


class OfferedTools(Value):
    """The tools of one remote environment."""

    name: str
    """The environment."""
    title: str = ""
    """What it calls itself, with its version."""
    instance_id: str = ""
    """Your instance of it."""
    tools: list[OfferedTool] = []
    """In the environment's own order."""
    idle_s: float
    """Your instance is released when it was not called for so long."""


class CalledTool(Value):
    """What a tool answered."""

    tool: str
    """Its name."""
    text: str = ""
    """What a model would read."""
    content: list[JsonObject] = []
    """Content blocks as MCP has them."""
    structured: Any = None
    """Structured content, where it gave any."""
    is_error: bool = False
    """The tool says that it failed."""
    seconds: float = 0.0
    """How long it took."""


class ReleasedEnvironment(Value):
    """An instance was given back."""

    name: str
    """The environment."""
    released: bool
    """False where there was none."""
