"""What the model saw, token by token: the ids of a prompt and their texts, from the log or from its engine."""

from __future__ import annotations

from urllib.parse import urlsplit

import anyio
import httpx

from rollcage.events import Queued, TurnEnded
from rollcage.store import Store
from rollcage.types import Endpoint, Turn, Value

TURNS = 200
"""Turns before this one that are looked through for the texts of ids."""
ASKED = 8000
"""How many ids the engine is asked for at most."""
AT_ONCE, TIMEOUT_S = 16, 20.0


class PromptText(Value):
    """A prompt by token."""

    ids: tuple[int, ...]
    """The engine's own ids of the whole prompt; empty where the engine did not tell."""
    texts: dict[int, str]
    """The text of each id, as far as it is known."""
    problem: str = ""
    """Why some may be missing."""

    @property
    def missing(self) -> list[int]:
        """Ids without a text."""
        return [each for each in dict.fromkeys(self.ids) if each not in self.texts]


async def prompt_text(store: Store, rollout_id: str, seq: int) -> PromptText:
    """The prompt of the turn in that entry. What was sampled anywhere in the rollout before has its text there."""
    # The newest are wanted, up to this one.
    entries = await store.read(rollout_id, after=max(0, seq - TURNS * 50), kinds=("turn_ended",))
    turns = [entry.event.turn for entry in entries if isinstance(entry.event, TurnEnded) and entry.seq <= seq]
    endpoint = await _endpoint(store, rollout_id)
    return await anyio.to_thread.run_sync(lambda: _known(turns[-TURNS:], endpoint))


def _known(turns: list[Turn], endpoint: Endpoint | None) -> PromptText:
    ids = turns[-1].prompt_ids if turns else ()
    wanted = set(ids)
    texts: dict[int, str] = {}
    if endpoint is not None and endpoint.kind == "scripted":
        from rollcage.simulators.scripted.tokenizer import default_tokenizer

        tokenizer = default_tokenizer()
        return PromptText(ids=ids, texts={each: tokenizer.token_text(each) for each in wanted if each < tokenizer.size})
    for turn in turns:
        for token in turn.tokens:
            for text, number in ((token.text, token.id), *((other.text, other.id) for other in token.top)):
                if number is not None and number in wanted:
                    texts[number] = text
    return PromptText(ids=ids, texts=texts)


async def ask_engine(store: Store, rollout_id: str, seq: int) -> PromptText:
    """The same, with the texts of the other ids as the engine spells them (`/detokenize`: vLLM, SGLang, llama.cpp)."""
    found = await prompt_text(store, rollout_id, seq)
    endpoint = await _endpoint(store, rollout_id)
    if endpoint is None or not found.missing:
        return found
    texts, problems = dict(found.texts), list[str]()
    limiter = anyio.CapacityLimiter(AT_ONCE)
    parts = urlsplit(endpoint.base_url)
    root = f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/v1')}"

    async def spell(client: httpx.AsyncClient, token: int) -> None:
        async with limiter:
            if problems:
                return
            try:
                body = {"model": endpoint.model, "tokens": [token]}
                answer = (await client.post(f"{root}/detokenize", json=body)).raise_for_status().json()
                text = next(answer[name] for name in ("prompt", "content", "text") if isinstance(answer.get(name), str))
                texts[token] = text[:200]
            except (httpx.HTTPError, ValueError, AttributeError, StopIteration, TypeError) as error:
                problems.append(f"the engine does not tell ({type(error).__name__}): it is away, or has no /detokenize")

    with anyio.move_on_after(TIMEOUT_S):
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client, anyio.create_task_group() as tasks:
            for token in found.missing[:ASKED]:
                tasks.start_soon(spell, client, token)
    return PromptText(ids=found.ids, texts=texts, problem=problems[0] if problems else "")


async def _endpoint(store: Store, rollout_id: str) -> Endpoint | None:
    first = (await store.read(rollout_id, limit=1))[0].event
    return first.job.model if isinstance(first, Queued) else None
