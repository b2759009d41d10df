"""How a cluster is used, and what it looks like from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rollcage.types import Value

if TYPE_CHECKING:
    from rollcage.cluster.head import Head
    from rollcage.runner import Registry
    from rollcage.settings import Settings


Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Of a resource, as Ray counts it."""


class Cluster(Value):
    """A Ray cluster whose nodes run rollouts, and how they are put there. Used by `open_runner`, `eval` and servers."""

    address: str = "auto"
    """`local`: a Ray of our own on this machine; `auto`: the one that runs here; else its address, `host:6379`."""
    resources: dict[str, Amount] = {"CPU": 0.25}
    """What one rollout takes of a node, as Ray counts: `CPU`, `memory`, or a resource that `ray start` was told of. A
    node has as many places as fit, and holds them all: Ray puts nothing else there."""
    places: int = Field(default=64, ge=1)
    """Rollouts that run on one node at most."""
    labels: dict[str, str] = {}
    """Only nodes with these Ray labels are used."""
    lease_s: float = Field(default=60.0, ge=0.5)
    """A node that the head has not heard for so long stops what it runs; only then others begin it anew. A process that
    ended is known at once: this is for machines that are out of reach."""
    node_home: str = ""
    """Where nodes keep layers and boxes; empty: where each one's own settings say (`ROLLCAGE_HOME`)."""
    warm: int = Field(default=0, ge=0)
    """Boxes that each node keeps open ahead."""

    autoscale: bool = False
    """Ask Ray's autoscaler for the nodes that waiting rollouts need, and let go of those that have nothing to do."""
    idle_s: float = Field(default=60.0, gt=0)
    """How long a node has nothing to do until it is let go, with `autoscale`."""

    @asynccontextmanager
    async def open(self, settings: Settings, registry: Registry) -> AsyncIterator[Head]:
        """What runs a runner's rollouts there, for as long as the block lasts."""
        from rollcage.cluster.content import ContentStore
        from rollcage.cluster.head import Head
        from rollcage.cluster.ray_connection import check_serve, connection
        from rollcage.cluster.ray_nodes import RayNodes
        from rollcage.store.work import WorkStore
        from rollcage.wiring import MOST_TREE_BYTES, provider

        trees = WorkStore(settings.trees_dir, MOST_TREE_BYTES)
        content = ContentStore(
            provider(settings).images, trees, WorkStore(settings.work_dir, settings.keep_work_mb << 20)
        )
        if registry.gateway.replicas.app:
            check_serve()
        async with (
            connection(self.address),
            Head.open(settings, self, RayNodes(self.resources, self.lease_s, self.labels), registry, content) as head,
        ):
            yield head


class NodeInfo(Value):
    """A node, as Ray knows it."""

    id: str
    address: str
    resources: dict[str, float] = {}
    """What of it nobody holds."""
    labels: dict[str, str] = {}
    here: bool = False
    """Whether it is on the head's own machine."""
    draining: bool = False
    """Whether it finishes what it runs and gets nothing new."""
