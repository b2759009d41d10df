"""What the gateway asks a model's server on its own account: whether it is there, who it is, what prompt it makes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from rollcage.errors import ModelUnreachable
from rollcage.gateway.engines import QUESTIONS, Engine, ProbeAnswer, engine_of, signed
from rollcage.gateway.http_out import Target, Upstream, UpstreamError, headers_for
from rollcage.types import Endpoint, JsonObject

CHECK_TIMEOUT_S = 5.0
OPTIONAL_TIMEOUT_S = 2.0
"""How long an answer may take that is merely good to have."""


async def identify(upstream: Upstream, endpoint: Endpoint) -> ModelUnreachable | Engine:
    """The engine behind an endpoint; or what is wrong with the endpoint."""
    where = f"the model at {endpoint.base_url}"
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            models = await ask(upstream, endpoint, "/v1/models")
    except UpstreamError as error:
        return ModelUnreachable(f"cannot reach {where}: {error}", remedy="start its server, or correct base_url")
    except TimeoutError:
        late = f"{where} did not answer within {CHECK_TIMEOUT_S:.0f} s"
        return ModelUnreachable(late, remedy="see whether its server is up, or correct base_url")
    if models.status in (401, 403):
        return ModelUnreachable(f"{where} refuses the key (HTTP {models.status})", remedy="set the right API key")
    name = signed(endpoint, models)
    paths = QUESTIONS.get(name, ())
    said = await asyncio.gather(*(ask_optional(upstream, endpoint, path) for path in paths))
    return engine_of(name, dict(zip(paths, said, strict=True)))


async def prompt_ids(upstream: Upstream, endpoint: Endpoint, sent: JsonObject) -> tuple[int, ...]:
    """The ids of the prompt that llama.cpp makes of a chat request: its own template, its own tokenizer.

    Empty where it does not tell.
    """
    prompt = (await ask_optional(upstream, endpoint, "/apply-template", sent)).value.get("prompt")
    if not isinstance(prompt, str):
        return ()
    asked = {"content": prompt, "add_special": True, "parse_special": True}
    ids = (await ask_optional(upstream, endpoint, "/tokenize", asked)).value.get("tokens")
    return tuple(ids) if isinstance(ids, list) and all(type(each) is int for each in ids) else ()


async def ask_optional(
    upstream: Upstream,
    endpoint: Endpoint,
    path: str,
    body: JsonObject | None = None,
    *,
    timeout_s: float = OPTIONAL_TIMEOUT_S,
) -> ProbeAnswer:
    """One question whose answer is merely good to have: an empty one where it does not come in time."""
    with suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await ask(upstream, endpoint, path, body)
    return ProbeAnswer()


async def ask(upstream: Upstream, endpoint: Endpoint, path: str, body: JsonObject | None = None) -> ProbeAnswer:
    """One question, and its whole answer. Raises UpstreamError."""
    headers = {**headers_for(endpoint), "Accept": "application/json"}
    payload = b"" if body is None else msgspec.json.encode(body)
    if body is not None:
        headers["Content-Type"] = "application/json"
    # Engines have their own routes beside `/v1`, wherever that is.
    below = path.startswith("/v1/")
    root = endpoint.base_url if below else endpoint.base_url.rstrip("/").removesuffix("/v1")
    target = Target.of(root, path.removeprefix("/v1") if below else path)
    method, length = ("GET", None) if body is None else ("POST", len(payload))
    connection = await upstream.open(target, target.head(method, headers, length), payload)
    pieces: list[bytes] = []
    try:
        if broken := await connection.body(pieces.append):
            raise UpstreamError(broken)
    finally:
        connection.release()
    return ProbeAnswer(connection.status, b"".join(pieces), connection.headers)
