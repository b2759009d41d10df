"""What one session came to, at a glance."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, TextIO

from opencode_env._loop import loop
from rollcage.errors import SandboxError
from rollcage.sandboxes.files import collect
from rollcage.types import HOME, JsonObject

if TYPE_CHECKING:
    from opencode_env.harness import OpenCodeSession


@dataclass(frozen=True)
class RolloutSummary:
    """A snapshot of one session."""

    sandbox_id: str
    """Its box."""
    proxy_turns: list[JsonObject]
    """Every model call; empty in `black_box` mode."""
    opencode_events: list[JsonObject]
    """What the agent said."""
    workdir_listing: str
    """`ls -la` of the workdir."""
    workdir_contents: dict[str, str]
    """`{path: text}` of the files there."""

    def proxy_turn_count(self) -> int:
        """How many model calls there were."""
        return len(self.proxy_turns)

    def productive_turn_count(self) -> int:
        """How many of them brought tokens."""
        return sum(1 for turn in self.proxy_turns if turn.get("completion_tokens"))

    def total_completion_tokens(self) -> int:
        """How many tokens they brought in all."""
        return sum(len(turn.get("completion_tokens", ())) for turn in self.proxy_turns)

    def tool_calls(self) -> list[str]:
        """The tools that the agent used, in order."""
        parts = [_table(event.get("part")) for event in self.opencode_events if event.get("type") == "tool_use"]
        return [str(part.get("tool") or "unknown") for part in parts]

    def errors(self) -> list[str]:
        """What the agent complained about."""
        said = [event.get("error") for event in self.opencode_events if event.get("type") == "error"]
        return [str(_table(error.get("data")).get("message", "")) for error in said if isinstance(error, dict)]


def _table(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def collect_rollout_summary(session: OpenCodeSession, *, workdir: str = f"{HOME}/workdir") -> RolloutSummary:
    """Read a session's records and its workdir; while the agent runs, as far as it has come.

    Of a box that is closed there is no workdir left to read.
    """
    listing, files = "", {}
    with suppress(SandboxError):
        listing = session.sandbox.exec(f"ls -la -- {quote(workdir)} 2>&1", timeout=10).stdout
        files = loop().call(collect, session.sandbox.box, workdir).files
    return RolloutSummary(
        sandbox_id=session.sandbox.sandbox_id,
        proxy_turns=[dict(entry) for entry in session.fetch_proxy_trace()],
        opencode_events=session.said,
        workdir_listing=listing,
        workdir_contents={f"{workdir}/{path}": text for path, text in files.items()},
    )


def print_rollout_summary(summary: RolloutSummary, *, stream: TextIO | None = None, show_bodies: bool = False) -> None:
    """Tell a person what a session came to. `show_bodies`: with the last answer of the model."""
    from rollcage.cli.text import one_line

    tools = [one_line(tool, 100) for tool in summary.tool_calls()]
    sizes = {one_line(path): len(text) for path, text in summary.workdir_contents.items()}
    lines = [
        f"session in box {one_line(summary.sandbox_id, 200)}",
        f"  model calls  {summary.proxy_turn_count()}, {summary.productive_turn_count()} with tokens",
        f"  tokens       {summary.total_completion_tokens()}",
        f"  tool calls   {len(tools)}{': ' + ', '.join(tools) if tools else ''}",
        *(f"  error        {one_line(error, 200)}" for error in summary.errors()),
        *(f"  file         {path}, {size} characters" for path, size in sizes.items()),
    ]
    if show_bodies and summary.proxy_turns:
        lines.append(json.dumps(summary.proxy_turns[-1].get("response"), indent=2)[:2000])
    print("\n".join(lines), file=stream or sys.stdout, flush=True)
