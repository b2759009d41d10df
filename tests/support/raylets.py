"""A real Ray of several nodes on this machine, and what kills parts of it."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.processes import alive

QUICK = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}


def patiently(start: Callable[[], Any]) -> Any:
    """A raylet gives up where its own helpers take half a minute to start, as on a busy machine."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:  # noqa: BLE001 - Ray raises no other
            failure = error
    raise failure


@contextmanager
def raylets(nodes: int, *, cpus: float = 1, places: int = 4) -> Iterator[Any]:
    """So many nodes, none of which this process is connected to; with `nodes=0` only Ray's head, without places."""
    os.environ["RAY_raylet_start_wait_time_s"] = "60"  # noqa: SIM112 - Ray's own spelling
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster as Raylets

        head = {"num_cpus": cpus, "include_dashboard": False, "_system_config": QUICK}
        head["resources"] = {"place": places} if nodes else {}
        found = patiently(lambda: Raylets(initialize_head=True, head_node_args=head))
        try:
            for _ in range(nodes - 1):
                patiently(lambda: found.add_node(num_cpus=cpus, resources={"place": places}))
            yield found
        finally:
            found.shutdown()


def processes_of(node: Any) -> list[int]:
    """A node's raylet and what it started."""
    raylet = node.all_processes["raylet"][0].process
    children = Path(f"/proc/{raylet.pid}/task/{raylet.pid}/children").read_text().split()
    return [raylet.pid, *map(int, children)]


def actors_of(found: Any) -> list[int]:
    """The processes of this cluster's actors: the machine may have other clusters."""
    ours = {pid for node in found.list_all_nodes() for pid in processes_of(node)}
    return sorted(ours.intersection([*alive("ray::NodeActor"), *alive("ray::rollout")]))


def kill(found: Any, node: Any) -> None:
    """All processes of a node at once, as a machine dies."""
    for pid in processes_of(node):
        os.kill(pid, signal.SIGKILL)
    found.remove_node(node, allow_graceful=False)
