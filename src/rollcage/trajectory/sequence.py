"""What trainers take: one row of ids, mask and logprobs, with what it earned and where it came from."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rollcage.types import Blame, Outcome, Purpose, Value

BreakKind = Literal["answer", "prompt", "shorter", "branch", "untrainable"]


class Split(NamedTuple):
    """A sequence as most trainers want it: a prompt, and a response whose mask leaves out what tools said."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    response_logprobs: tuple[float, ...]


class Shifted(NamedTuple):
    """A sequence as next-token losses want it: entry i of each list belongs to the target i."""

    input_ids: tuple[int, ...]
    """All but the last."""
    target_ids: tuple[int, ...]
    """All but the first."""
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]


class Break(Value):
    """Why a turn does not continue the one before it, or is in no sequence."""

    turn: int
    """The turn, by its index."""
    kind: BreakKind
    """`answer`: the next prompt has other tokens where the answer was. `prompt`: what came before the answer changed.
    `shorter`: the next prompt ends before that answer does. `branch`: it continues a turn that another one continues
    too. `untrainable`: it cannot be trained on."""
    after: int | None = None
    """The turn it was compared with."""
    position: int | None = None
    """The first token of its prompt that differs."""
    expected: tuple[int, ...] = ()
    """The ids that would have continued the sequence, from that position on: a few."""
    found: tuple[int, ...] = ()
    """The ids that its prompt has there."""
    expected_text: str = ""
    """The same as text, as far as the engine told it."""
    found_text: str = ""
    """The same as text, where the engine ever sampled these tokens."""
    reason: str
    """All of it in one line."""


class Sequence(Value):
    """A conversation token by token: what the model saw, what it said, and what of it is to be trained."""

    input_ids: tuple[int, ...]
    """The engine's own ids: the last turn's whole prompt, and its answer."""
    loss_mask: tuple[int, ...]
    """1 for each token that is trained here, 0 elsewhere."""
    logprobs: tuple[float, ...]
    """The engine's own logprob of each trained token, 0.0 elsewhere."""
    reward: float | None = None
    """What the rollout earned; None where nothing was scored, which is not 0."""
    trust: str | None = None
    """How well the verifier was kept apart from what it judged."""
    blame: Blame | None = None
    """Whose fault it is that nothing was scored; None where something was, or where nobody is to blame."""
    rollout_id: str = ""
    """The rollout. Its sequences share one reward."""
    group_id: str = ""
    """The rollouts that belong together, as the caller named them."""
    task_id: str = ""
    """The caller's own name for the task."""
    index: int = 0
    """Its place among the sequences of the rollout."""
    session: str = ""
    """The agent's own session; subagents have others."""
    parent_session: str = ""
    """The session that started this one."""
    purpose: Purpose = Purpose.AGENT
    """What the agent made these calls for."""
    turns: tuple[int, ...] = ()
    """The turns that are trained here, by their indexes, in the order of the conversation."""
    prompt_length: int = 0
    """Tokens before the first answer that is trained here."""
    truncated: bool = False
    """One of its answers was cut at the ceiling of tokens."""
    policy_versions: tuple[str, ...] = ()
    """The weights that each of the turns was sampled from, as the caller named them."""
    outcome: Outcome | None = None
    """How the rollout ended; None while it runs."""
    breaks: tuple[Break, ...] = ()
    """Why it begins where it does, and what it passes over."""
    forked_from: str = ""
    """The rollout that this one was forked from; empty where it was not."""
    shared_prefix: int = 0
    """Tokens at the beginning that all forks from that point have in common; none of them is trained here."""

    @property
    def trained_tokens(self) -> int:
        """How many of its tokens are trained."""
        return sum(self.loss_mask)

    def split(self) -> Split:
        """Cut at the first answer: a prompt, and a response in which the mask marks the model's own tokens."""
        at = self.prompt_length
        return Split(self.input_ids[:at], self.input_ids[at:], self.loss_mask[at:], self.logprobs[at:])

    def shifted(self) -> Shifted:
        """Inputs and targets of next-token prediction: target i is the token after input i, with its logprob."""
        return Shifted(self.input_ids[:-1], self.input_ids[1:], self.loss_mask[1:], self.logprobs[1:])

    def __repr__(self) -> str:
        """In one line; the whole of it may be megabytes."""
        size = f"{len(self.input_ids)} tokens, {self.trained_tokens} trained"
        return f"<Sequence {self.index} of {self.rollout_id}: turns {list(self.turns)}, {size}, reward {self.reward}>"

    __str__ = __repr__
