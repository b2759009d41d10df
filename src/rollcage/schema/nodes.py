"""The machines that run rollouts, where they are not the server's own."""

from __future__ import annotations

from rollcage.types import Value


class NodeView(Value):
    """A node of a cluster, as it is shown."""

    id: str
    """Ray's own."""
    address: str
    state: str
    """`starting`, `ready`, `draining` (finishes what it runs), `unreachable`, `resting` (let go of), or `unusable`."""
    places: int
    """Rollouts that may run there at once."""
    running: int = 0
    """Rollouts that do."""
    calls: int = 0
    """Model calls that run."""
    load: float = 0.0
    """The machine's load average over one minute."""
    images: tuple[str, ...] = ()
    """Prebaked boxes that it has."""
    rollouts: tuple[str, ...] = ()
    """Ids of what runs there."""
    labels: dict[str, str] = {}
    """Ray's labels of it."""
    seconds: float = 0.0
    """Since it joined."""
    problem: str = ""
    """Why it is unusable."""


class Nodes(Value):
    """The nodes of a cluster; none where the server runs rollouts itself."""

    nodes: tuple[NodeView, ...] = ()
