"""The client of the agent's own server, as published: what the session has heard from it, for sync callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcage.types import JsonObject

if TYPE_CHECKING:
    from opencode_env.harness import OpenCodeSession


class ServeClient:
    """One session of `opencode serve`. Its server is inside the box, and nothing outside reaches it directly."""

    def __init__(self, session: OpenCodeSession) -> None:
        self._session = session

    def list_messages(self, session_id: str) -> list[JsonObject]:
        """The transcript so far, `[{info, parts}]`; LookupError for a session that is not this one."""
        self._check(session_id)
        return self._session.list_messages()

    def get_all_status(self) -> dict[str, JsonObject]:
        """Whether the session has nothing more to do: `{id: {"idle": ...}}`."""
        name = self._session.serve_session_id
        return {name: {"idle": not self._session.running}} if name else {}

    def abort(self, session_id: str) -> bool:
        """Stop the agent; whether there was something to stop."""
        self._check(session_id)
        return self._session.abort()

    def _check(self, session_id: str) -> None:
        known = self._session.serve_session_id
        if session_id != known:
            raise LookupError(f"session_id: no session {session_id!r} here; there is {known!r}")
