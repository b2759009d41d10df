"""The ticket desk's task as a rollout runs it, with the answers that the scripted model gives."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rollcage.simulators.fleet.desk import CHARGED_TWICE, INSTRUCTION, VERIFIER, Desk
from rollcage.types import Limits, ScriptedCall, ScriptedTurn, Task


def desk_task(seed: int = 7, *, prefix: str = "env_", limits: Limits | None = None) -> Task:
    """Find who was charged twice and see to it. `prefix`: what the agent puts before the names of tools."""
    ticket = charged_twice(seed)
    reply = "Sorry about that. The second charge is refunded today."
    turns = [
        _calls(prefix + "search_tickets", search={"text": "charged twice", "status": "open"}),
        _calls(prefix + "read_ticket", ticket_id=ticket),
        _calls(prefix + "assign_ticket", ticket_id=ticket, assignee="billing"),
        _calls(prefix + "reply_to_ticket", ticket_id=ticket, text=reply),
        _calls(prefix + "resolve_ticket", ticket_id=ticket),
        ScriptedTurn(text=f"Ticket {ticket} is with billing, the customer knows about the refund, and it is resolved."),
    ]
    return Task(
        id="charged-twice",
        instruction=INSTRUCTION,
        verifier=VERIFIER,
        environment_seed=seed,
        solution=tuple(turns),
        limits=limits or Limits(agent_timeout_s=120, verify_timeout_s=60),
    )


def charged_twice(seed: int) -> int:
    """The ticket that the task is about, at a desk that was reset with this seed."""
    with tempfile.TemporaryDirectory(prefix="rollcage-desk-") as folder:
        desk = Desk(Path(folder))
        desk.reset(seed)
        return int(desk.rows("SELECT id FROM tickets WHERE subject = ?", (CHARGED_TWICE,))[0]["id"])


def _calls(name: str, **arguments: Any) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name=name, arguments=arguments),))
