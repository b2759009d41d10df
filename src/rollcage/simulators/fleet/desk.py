"""A ticket desk on SQLite: the small real environment of the local Fleet. Its start depends on the seed alone."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL, tier TEXT NOT NULL);
CREATE TABLE tickets (
  id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers, subject TEXT NOT NULL, body TEXT NOT NULL,
  status TEXT NOT NULL, priority INTEGER NOT NULL, assignee TEXT, opened TEXT NOT NULL);
CREATE TABLE replies (
  id INTEGER PRIMARY KEY, ticket_id INTEGER NOT NULL REFERENCES tickets, author TEXT NOT NULL, text TEXT NOT NULL);
"""

_NAMES = ("Ada", "Bela", "Chidi", "Dora", "Emre", "Farah", "Goran", "Hana", "Ines", "Jomo", "Kaja", "Luan")
_FAMILIES = ("Okafor", "Lind", "Moreau", "Sato", "Novak", "Haddad", "Silva", "Berg")
_PROBLEMS = (
    ("Parcel never arrived", "The tracking page has said 'on its way' for {days} days."),
    ("Cannot sign in", "The reset mail for {email} does not come."),
    ("Wrong size", "I ordered size {days} and got another. How do I send it back?"),
    ("Invoice address", "Please put our new address on the next invoice."),
    ("Broken on arrival", "The lid was cracked when I opened the box {days} days ago."),
    ("How do I cancel?", "I cannot find the button to end my subscription."),
)
CHARGED_TWICE = "Charged twice"

INSTRUCTION = (
    f"One customer was charged twice. Find the open ticket with the subject '{CHARGED_TWICE}', assign it to billing, "
    "write the customer a reply that says the second charge is refunded, and resolve the ticket. Change nothing else."
)
"""The task that the desk's verifier checks."""

VERIFIER = '''
def verify(before, after, answer=None):
    """1 where the ticket is done and nothing else was touched; parts of it for parts of the work."""
    ticket = before.table("tickets").eq("subject", "Charged twice").first()
    now = after.table("tickets").eq("id", ticket["id"]).first()
    replies = after.table("replies").eq("ticket_id", ticket["id"]).all()
    others = before.table("tickets").neq("id", ticket["id"]).sort("id").all()
    if others != after.table("tickets").neq("id", ticket["id"]).sort("id").all():
        return 0.0
    done = [
        now["assignee"] == "billing",
        any("refund" in reply["text"].lower() for reply in replies),
        now["status"] == "resolved",
    ]
    return round(sum(done) / len(done), 4)
'''
"""Reads the desk's data before and after; what the reward of `INSTRUCTION` is."""


class Desk:
    """The data of one instance, in a folder of its own: `seed.db` is the start, `current.db` is now."""

    def __init__(self, folder: Path, *, tickets: int = 12) -> None:
        self._folder, self._tickets = folder, tickets
        folder.mkdir(parents=True, exist_ok=True)
        self.reset(0)

    @property
    def paths(self) -> dict[str, Path]:
        """The databases by name."""
        return {"seed": self._folder / "seed.db", "current": self._folder / "current.db"}

    def reset(self, seed: int) -> None:
        """Everything as it was; another seed gives other customers and tickets."""
        for path in self.paths.values():
            path.unlink(missing_ok=True)
        with closing(sqlite3.connect(self.paths["seed"])) as database, database:
            database.executescript(SCHEMA)
            _fill(database, random.Random(seed), self._tickets)  # noqa: S311 - made-up tickets, no secrets
        shutil.copyfile(self.paths["seed"], self.paths["current"])

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """What a query gives."""
        with self.opened() as database:
            return [dict(row) for row in database.execute(query, values)]

    def change(self, query: str, values: Sequence[Any] = ()) -> int:
        """How many rows a change touched."""
        with self.opened() as database, database:
            return database.execute(query, values).rowcount

    @contextmanager
    def opened(self, name: str = "current", *, read_only: bool = False) -> Iterator[sqlite3.Connection]:
        """One of the databases."""
        mode = "ro" if read_only else "rw"
        with closing(sqlite3.connect(f"file:{self.paths[name]}?mode={mode}", uri=True)) as database:
            database.row_factory = sqlite3.Row
            yield database


def _fill(database: sqlite3.Connection, chance: random.Random, count: int) -> None:
    people = [f"{first} {family}" for first in _NAMES for family in _FAMILIES]
    chance.shuffle(people)
    charged = chance.randrange(count)
    for n in range(count):
        name = people[n % len(people)]
        email = f"{name.lower().replace(' ', '.')}@example.com"
        database.execute(
            "INSERT INTO customers VALUES (?, ?, ?, ?)", (n + 1, name, email, chance.choice(("free", "plus")))
        )
        if n == charged:
            amount = chance.randrange(900, 9900) / 100
            subject, body = CHARGED_TWICE, f"My card shows {amount:.2f} two times for the same order."
            status = "open"
        else:
            subject, body = chance.choice(_PROBLEMS)
            body, status = (
                body.format(days=chance.randrange(3, 30), email=email),
                chance.choice(("open", "open", "waiting")),
            )
        ticket = (
            101 + n,
            n + 1,
            subject,
            body,
            status,
            chance.randrange(1, 5),
            None,
            f"2026-01-{n % 28 + 1:02d}T09:00:00Z",
        )
        database.execute("INSERT INTO tickets VALUES (?, ?, ?, ?, ?, ?, ?, ?)", ticket)
