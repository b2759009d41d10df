"""The endpoint catalog by its published names: rollcage's own, for callers that resolve endpoints themselves."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import SecretStr

from rollcage.endpoints import CATALOG, EndpointRequest, resolve
from rollcage.errors import UsageError
from rollcage.settings import Settings, variable

ENDPOINT_KINDS = ("vllm", "openai", "hf_router")
"""The kinds that the published environment knows; `run_rollout` takes more."""


class ResolvedEndpoint(NamedTuple):
    """One endpoint with every field filled in."""

    kind: str
    """Its catalog entry."""
    base_url: str
    """The model's address, with `/v1`."""
    api_key: str
    """The key."""
    model: str
    """The model's name there."""
    disable_thinking_default: bool
    """Whether thinking is disabled where nobody says."""


def resolve_endpoint(kind: str, *, base_url: str = "", api_key: str = "", model: str = "") -> ResolvedEndpoint:
    """Each field as given, else from its variable, else the catalog's default; ValueError where one is missing."""
    if kind not in ENDPOINT_KINDS:
        raise ValueError(f"unknown endpoint kind {kind!r}; known are {', '.join(ENDPOINT_KINDS)}")
    asked = EndpointRequest(endpoint=kind, base_url=base_url, api_key=SecretStr(api_key), model=model)
    try:
        found = resolve(asked, Settings.from_environ())
    except UsageError as error:
        raise ValueError(str(error)) from error
    key = found.key.get_secret_value()
    return ResolvedEndpoint(kind, found.base_url, key, found.model, CATALOG[kind].thinking is False)


def catalog_summary() -> list[dict[str, Any]]:
    """Every kind with its variables, its defaults, and whether the environment has all that it needs. No keys."""
    return [_entry(kind) for kind in ENDPOINT_KINDS]


def _entry(kind: str) -> dict[str, Any]:
    default = CATALOG[kind]
    try:
        resolve_endpoint(kind)
        configured = True
    except ValueError:
        configured = False
    return {
        "kind": kind,
        "base_url_env": variable(kind, "base_url"),
        "api_key_env": variable(kind, "api_key"),
        "model_env": variable(kind, "model"),
        "default_base_url": default.base_url,
        "default_model": default.model,
        "configured": configured,
    }
