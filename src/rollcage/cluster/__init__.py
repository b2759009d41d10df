"""Many machines: the same rollouts on the nodes of a Ray cluster. Queue, log, groups and page stay at the head.

Read `head.py` for the head, `nodes.py` for who is there, `node.py` for a node, `ray_nodes.py` for what Ray does.
"""

from rollcage.cluster.options import Cluster

__all__ = ["Cluster"]
