"""What can be done at the ticket desk: the API tools of one MCP endpoint, and the `computer` of the other."""

from __future__ import annotations

import struct
import zlib
from typing import Any, Literal

import anyio
from pydantic import BaseModel, Field

from rollcage.simulators.fleet.desk import Desk
from rollcage.simulators.fleet.faults import Faults

_TICKETS = """SELECT tickets.id, customers.name AS customer, subject, status, priority, assignee
FROM tickets JOIN customers ON customers.id = customer_id"""


class Period(BaseModel):
    """Days, both included, as YYYY-MM-DD."""

    first: str | None = None
    last: str | None = None


class Search(BaseModel):
    """What to look for; everything given must hold."""

    text: str | None = Field(default=None, description="Words in subject or body.")
    status: Literal["open", "waiting", "resolved"] | None = None
    priority: int | list[int] | None = Field(default=None, description="One, or any of several.")
    opened: Period = Period()


class DeskTools:
    """The tools, bound to one desk; `calls` says what was really carried out."""

    def __init__(self, desk: Desk, faults: Faults) -> None:
        self._desk, self._faults = desk, faults
        self.begun: list[str] = []
        """Calls that have arrived, whatever became of them."""
        self.calls: list[str] = []
        self.stopped: list[str] = []
        """Calls that were cancelled while they hung."""

    def api(self) -> list[Any]:
        """The tools of the endpoint `mcp`."""
        named = (self.list_tickets, self.search_tickets, self.read_ticket, self.assign_ticket, self.reply_to_ticket)
        return [*named, self.resolve_ticket]

    async def list_tickets(self, status: Literal["open", "waiting", "resolved"] | None = None, limit: int = 20) -> Any:
        """List tickets, oldest first."""
        await self._begin("list_tickets")
        where, values = (" WHERE status = ?", [status]) if status else ("", [])
        return {"tickets": self._desk.rows(f"{_TICKETS}{where} ORDER BY tickets.id LIMIT ?", [*values, limit])}

    async def search_tickets(self, search: Search, limit: int = 20) -> Any:
        """Find tickets."""
        await self._begin("search_tickets")
        found = self._desk.rows(f"{_TICKETS} ORDER BY tickets.id")
        details = {row["id"]: row for row in self._desk.rows("SELECT id, body, opened FROM tickets")}
        return {"tickets": [row for row in found if _fits(row | details[row["id"]], search)][:limit]}

    async def read_ticket(self, ticket_id: int) -> Any:
        """Read one ticket with its replies."""
        await self._begin("read_ticket")
        ticket = self._ticket(ticket_id)
        replies = self._desk.rows("SELECT author, text FROM replies WHERE ticket_id = ? ORDER BY id", [ticket_id])
        return {**ticket, "replies": replies}

    async def assign_ticket(self, ticket_id: int, assignee: Literal["billing", "shipping", "support"]) -> Any:
        """Give a ticket to a team."""
        await self._begin("assign_ticket")
        self._ticket(ticket_id)
        self._desk.change("UPDATE tickets SET assignee = ? WHERE id = ?", [assignee, ticket_id])
        return self._ticket(ticket_id)

    async def reply_to_ticket(self, ticket_id: int, text: str) -> Any:
        """Write to the customer."""
        await self._begin("reply_to_ticket")
        self._ticket(ticket_id)
        self._desk.change("INSERT INTO replies (ticket_id, author, text) VALUES (?, 'desk', ?)", [ticket_id, text])
        return {
            "replies": self._desk.rows("SELECT count(*) AS n FROM replies WHERE ticket_id = ?", [ticket_id])[0]["n"]
        }

    async def resolve_ticket(self, ticket_id: int) -> Any:
        """Mark a ticket as done."""
        await self._begin("resolve_ticket")
        self._ticket(ticket_id)
        self._desk.change("UPDATE tickets SET status = 'resolved' WHERE id = ?", [ticket_id])
        return self._ticket(ticket_id)

    async def computer(self, action: Literal["screenshot", "cursor_position", "wait"]) -> Any:
        """Look at the desk's screen."""
        await self._begin("computer")
        if action == "screenshot":
            tickets = self._desk.rows("SELECT status FROM tickets ORDER BY id")
            from fastmcp.utilities.types import Image

            return Image(data=_picture([row["status"] for row in tickets]), format="png")
        return {"x": 0, "y": 0} if action == "cursor_position" else {"waited": True}

    async def _begin(self, name: str) -> None:
        self.begun.append(name)
        self._faults.moved()
        while name in self._faults.held:
            await self._faults.wait()
        if name in self._faults.hanging:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                self.stopped.append(name)
                self._faults.moved()
                raise
        if name in self._faults.slow_tools:
            await anyio.sleep(self._faults.slow_tools[name])
        self.calls.append(name)
        self._faults.moved()

    def _ticket(self, ticket_id: int) -> dict[str, Any]:
        found = self._desk.rows(
            "SELECT tickets.id, name AS customer, subject, body, status, priority, assignee FROM tickets "
            "JOIN customers ON customers.id = customer_id WHERE tickets.id = ?",
            [ticket_id],
        )
        if not found:
            raise ValueError(f"there is no ticket {ticket_id}; list_tickets shows them")
        return found[0]


def _fits(row: dict[str, Any], search: Search) -> bool:
    priorities = [search.priority] if isinstance(search.priority, int) else search.priority
    day = row["opened"][:10]
    return (
        (search.text is None or search.text.lower() in f"{row['subject']} {row['body']}".lower())
        and (search.status is None or row["status"] == search.status)
        and (priorities is None or row["priority"] in priorities)
        and (search.opened.first or "") <= day <= (search.opened.last or "9999")
    )


def _picture(statuses: list[str]) -> bytes:
    """A PNG with one square per ticket: red is open, yellow is waiting, green is resolved."""
    colours = {"open": b"\xc0\x30\x30", "waiting": b"\xd0\xb0\x30", "resolved": b"\x30\xa0\x50"}
    line = b"\0" + b"".join(colours[status] * 8 for status in statuses)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 8 * len(statuses), 8, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(line * 8)) + chunk(b"IEND", b"")
