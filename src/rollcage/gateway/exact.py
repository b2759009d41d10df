"""Prompts of `history = "exact"`: asks the engine what its template makes of a request, and has `history` plan on it.

Whatever the engine does not tell, or tells too late, costs that turn its exact prompt and nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollcage.gateway.engines import Engine, KnownEngines
from rollcage.gateway.history import History, PromptPlan, Seam, refused, seam_of
from rollcage.gateway.http_out import Upstream
from rollcage.gateway.probe import ask_optional
from rollcage.types import Endpoint, JsonObject, Turn, TurnHistory

TIMEOUT_S = 10.0
"""How long the engine may take to tell what its template makes of a request."""
LONGEST = 8 << 20
"""Bytes of a request: to look through a longer one would hold up all others."""
_RENDERED = ("model", "messages", "tools", "chat_template", "chat_template_kwargs")
_ASKED = [{"role": "user", "content": "a"}]


@dataclass
class ExactPrompts:
    """The exact prompts of one lease."""

    upstream: Upstream
    known: KnownEngines
    endpoint: Endpoint
    history: History = field(default_factory=History)
    seam: Seam | None = None

    async def plan(self, request: JsonObject, engine: Engine, size: int) -> PromptPlan | TurnHistory:
        """The prompt of a request of so many bytes; or why there is none to plan."""
        if size > LONGEST:
            return TurnHistory(reason=f"it is longer than {LONGEST} bytes")
        if not engine.prompt_field:
            return TurnHistory(reason="this engine takes no prompt as ids; vLLM from 0.32 on does, and SGLang")
        if reason := refused(request):
            return TurnHistory(reason=reason)
        rendered, seam = await asyncio.gather(self._rendered(request), self._seam())
        if not rendered or seam is None:
            return TurnHistory(reason="the engine did not tell what its template makes of the messages")
        try:
            plan = self.history.plan(request, rendered, seam)
        except RecursionError:
            return TurnHistory(reason="it is nested too deep")
        if plan.ids and not self.endpoint.sampling.keep_reasoning and await self._leaves_thoughts_out(request):
            return plan.plain("the template leaves old reasoning out")
        return plan

    def learn(self, plan: PromptPlan | TurnHistory, turn: Turn, engine: Engine) -> Turn:
        """The turn with what became of its prompt; its ids are kept for those that follow."""
        if isinstance(plan, TurnHistory):
            return turn.model_copy(update={"history": plan})
        note = self.history.learn(plan, turn)
        if plan.note.exact and not note.exact:
            # It takes the ids and does otherwise: it must not be given any again.
            self.known.learn(self.endpoint, engine.without(engine.prompt_field))
        return turn.model_copy(update={"history": note})

    async def _leaves_thoughts_out(self, request: JsonObject) -> bool:
        both = self.history.thoughts(request)
        if both is None:
            return False
        full, bare = await asyncio.gather(*(self._rendered(each) for each in both))
        return full == bare

    async def _seam(self) -> Seam | None:
        if self.seam is None:
            answers = [{"role": "assistant", "content": text} for text in "bc"]
            asked = [{"model": self.endpoint.model, "messages": [*_ASKED, answer]} for answer in answers]
            one, other = await asyncio.gather(*(self._rendered(each, generate=False) for each in asked))
            end, *after = seam_of(one, other) or (None,)
            if end is None or not (text := await self._spelled(end)):
                return None
            self.seam = Seam(end, tuple(after), text)
        return self.seam

    async def _rendered(self, request: JsonObject, *, generate: bool = True) -> list[int]:
        asked = {name: request[name] for name in _RENDERED if request.get(name) is not None}
        answer = await self._ask("/tokenize", {**asked, "add_generation_prompt": generate})
        ids = answer.get("tokens")
        return ids if isinstance(ids, list) and all(type(each) is int for each in ids) else []

    async def _spelled(self, token: int) -> str:
        text = (await self._ask("/detokenize", {"model": self.endpoint.model, "tokens": [token]})).get("prompt")
        return text if isinstance(text, str) else ""

    async def _ask(self, path: str, body: JsonObject) -> JsonObject:
        return (await ask_optional(self.upstream, self.endpoint, path, body, timeout_s=TIMEOUT_S)).value
