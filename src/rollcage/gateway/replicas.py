"""Several addresses of one model: each rollout stays with one, where its prefix is cached, until that one fails."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

DOWN_S = 10.0
"""How long an address that failed is left alone, if another one answers."""


class Replicas:
    """Addresses that answer alike. An endpoint that names one of them may be served by any."""

    def __init__(self, addresses: Sequence[str] = (), file: Path | None = None, app: str = "") -> None:
        """`file`: one address per line, read again when it changes; it takes the place of `addresses`.

        `app`: an application of Ray Serve that answers at the first of these, and elsewhere: `use` says where.
        """
        self._file, self._read_at = file, 0
        self.app = app
        self.addresses: tuple[str, ...] = tuple(address.rstrip("/") for address in addresses)
        """As they are now; whoever knows better sets them."""
        self.named: frozenset[str] = frozenset()
        """Every address that was ever in the list: rollouts may name any."""
        self._path = urlsplit(self.addresses[0]).path if self.addresses else ""
        self._lent: Counter[str] = Counter()
        self._down: dict[str, float] = {}

    def use(self, servers: Sequence[str]) -> None:
        """These `http://host:port` answer alike from now on, below the same path; none: the last list holds."""
        self._note()
        if servers:
            self.addresses = tuple(sorted(server + self._path for server in servers))
            self._note()

    def refresh(self) -> None:
        """Read the file again, if there is one and it has changed."""
        if self._file is None:
            return
        try:
            changed = self._file.stat().st_mtime_ns
            if changed == self._read_at:
                return
            lines = self._file.read_text(encoding="utf-8").split("\n")
        except OSError:
            return  # it is being written anew, say: the last list holds
        self._read_at = changed
        self.addresses = tuple(line.strip().rstrip("/") for line in lines if line.strip() and line[0] != "#")

    def route(self, base_url: str) -> Route:
        """The way of one rollout to the model at this address."""
        self.refresh()
        return Route(self, base_url)

    def pick(self, base_url: str, *, than: str = "") -> str:
        """The address with the fewest rollouts that is not known to be down; one that is, where all are."""
        if not self.knows(base_url):
            return base_url
        others = [address for address in self.addresses if address != than] or [than]
        up = [address for address in others if not self.is_down(address)]
        fewest = min(self._lent[address] for address in up or others)
        return random.choice([address for address in up or others if self._lent[address] == fewest])  # noqa: S311

    def knows(self, base_url: str) -> bool:
        """Whether rollouts that name this address may use the others: it is in the list, or once was."""
        self._note()
        return base_url in self.named and bool(self.addresses)

    def _note(self) -> None:
        if not self.named.issuperset(self.addresses):
            self.named = self.named.union(self.addresses)

    def failed(self, address: str) -> None:
        """It did not answer."""
        self._down[address] = time.monotonic() + DOWN_S

    def is_down(self, address: str) -> bool:
        """Whether it did not answer a moment ago."""
        return self._down.get(address, 0.0) > time.monotonic()

    def take(self, address: str, number: int) -> None:
        """One more rollout is there, or one fewer."""
        self._lent[address] += number


class Route:
    """Which address one rollout uses now."""

    def __init__(self, replicas: Replicas, base_url: str) -> None:
        self._replicas, self._asked = replicas, base_url
        self.base_url = replicas.pick(base_url)
        """The address."""
        replicas.take(self.base_url, 1)

    def move(self) -> bool:
        """The address has failed: use another from now on; false where no other is worth asking."""
        replicas = self._replicas
        replicas.refresh()
        replicas.failed(self.base_url)
        other = replicas.pick(self._asked, than=self.base_url)
        if other == self.base_url or replicas.is_down(other):
            return False
        replicas.take(self.base_url, -1)
        replicas.take(other, 1)
        self.base_url = other
        return True

    def close(self) -> None:
        """The rollout is over."""
        self._replicas.take(self.base_url, -1)
