"""What the head and its nodes say to each other. Plain tuples, because Ray pickles them thousands of times a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rollcage.cluster.options import NodeInfo
from rollcage.gateway.live import Delta
from rollcage.settings import Settings
from rollcage.types import Job


class Hello(NamedTuple):
    """What a node is told when it begins. No keys but those of the backends that it opens boxes with."""

    places: int
    """Rollouts that may run there at once."""
    lease_s: float
    """It stops everything when the head has heard nothing of it for so long."""
    settings: Settings
    """The head's, but for keys of models and of its server."""
    home: str
    """Where the node keeps its layers and boxes; empty: where its own settings say."""
    marker: str
    """A file below the head's home: a node that sees it has the same home, and needs nothing sent."""
    warm: int = 0
    """Boxes kept open ahead."""


class Welcome(NamedTuple):
    """What a node says once it can run rollouts."""

    version: str
    """Of rollcage."""
    port: int
    """Where it waits for the head's lifeline: a connection that says nothing, and breaks when either side dies."""
    secret: bytes
    """What both ends know."""
    shared: bool
    """Whether it has the head's home."""
    holds: frozenset[str]
    """Layers and images that it has."""
    streams: bool = False
    """Whether its news may be asked for at that port, too: not where Ray's own connections are encrypted."""


class Order(NamedTuple):
    """A rollout to run. The model's key travels beside it: an order may be large, and large things are stored."""

    name: str
    attempt: int
    job: Job
    generation: int
    """Which weights the head's gate had when it was started."""


class GateState(NamedTuple):
    """Whether model calls may begin, how they are stamped, and where they may go."""

    paused: bool
    running: str
    """What becomes of the calls that run when a pause begins."""
    wait_s: float
    policy_version: str
    generation: int
    replicas: tuple[str, ...]
    """Addresses of one model that answer alike."""
    named: frozenset[str]
    """Addresses that rollouts may name for them."""


class OutboxItem(NamedTuple):
    """One thing that a node has to tell of a rollout: an event, or a piece of the work that its agent left."""

    number: int
    """1, 2, 3 ... since the node began."""
    name: str
    attempt: int
    data: bytes
    """The event, pickled; or the piece, compressed."""
    kind: str = "event"
    """`event`; `piece`, then `work` once they are all there, or `drop` where they will never be."""


class Load(NamedTuple):
    """What a node is busy with."""

    running: int = 0
    calls: int = 0
    """Model calls that run."""
    waiting: int = 0
    """Model calls that wait for the end of a pause."""
    load: float = 0.0
    """The machine's load average over one minute."""


class NodeNews(NamedTuple):
    """What a node answers when the head asks for news."""

    number: int
    """1, 2, 3 ... since the node began."""
    items: list[OutboxItem]
    load: Load
    deltas: list[tuple[str, Delta | None]]
    """What models say, by the token of who watches; None at its end."""


class NodeLink(Protocol):
    """The head's way to one node. Every method raises `NodeLost` where the node is gone for good."""

    async def open(self, hello: Hello) -> Welcome:
        """Begin."""

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        """News of this number were heard, and items up to that one are in the log; what else is there?

        Waits a moment for news.

        TimeoutError where the node cannot be reached just now.
        """

    async def run(self, order: Order, key: str) -> None:
        """Run a rollout to its end."""

    async def abort(self, name: str, attempt: int) -> None:
        """Stop it; its last entries come as the others."""

    async def gate(self, state: GateState) -> None:
        """Pause or resume model calls; returns when none runs that should not."""

    async def watch(self, token: str, name: str) -> None:
        """Tell from now on, under this token, what models say to this rollout."""

    async def missing(self, names: frozenset[str]) -> frozenset[str]:
        """Which of these layers, images and trees it does not have."""

    async def receive(self, name: str, pieces: object) -> None:
        """Have one of them: its packed archive, as `NodeSource.stored` keeps it."""

    def end(self) -> None:
        """Have it ended, whatever it does."""


class NodeSource(Protocol):
    """Where nodes come from."""

    async def nodes(self) -> Sequence[NodeInfo]:
        """Those that are alive now; TimeoutError where nobody can tell."""

    async def ask_for(self, rollouts: int) -> None:
        """Let there be room for so many; TimeoutError where nobody can be asked."""

    async def served(self, app: str) -> Sequence[str]:
        """Where an application that runs there answers, as `http://host:port`; TimeoutError where nobody can tell."""

    def connect(self, node: NodeInfo, places: int) -> NodeLink:
        """A way to one of them, which holds what so many places take of it."""

    def stored(self, pieces: list[bytes]) -> object:
        """These, kept so that many nodes can fetch them."""


class NodeLost(Exception):
    """The node is gone, and what ran there with it."""
