"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from rollcage.events import Ended, Event, Queued, Requeued, StageEnded, TurnEnded
from rollcage.runner.queue import FairQueue
from rollcage.schema.nodes import NodeView

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """Counts what this process does; each server has its own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self, places: FairQueue, followers: Callable[[], int], nodes: Callable[[], Sequence[NodeView]] = lambda: ()
    ) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Nodes(nodes))

        def gauge(name: str, about: str, value: Callable[[], float]) -> None:
            Gauge(name, about, registry=registry).set_function(value)

        gauge("rollcage_rollouts_queued", "Rollouts that wait for a place.", lambda: places.waiting)
        gauge("rollcage_rollouts_running", "Rollouts that have a place.", lambda: places.running)
        gauge("rollcage_followers", "Streams of events that are open.", followers)
        self.log_bytes = Gauge("rollcage_log_bytes", "What the log takes on the disk.", registry=registry)
        """Set by whoever measures it."""
        self.work_bytes = Gauge("rollcage_work_bytes", "What the kept work of agents takes.", registry=registry)
        """Set by whoever measures it."""
        self.log_writable = Gauge("rollcage_log_writable", "1 where the log can be written.", registry=registry)
        """Set by whoever tried."""
        self._started = Counter("rollcage_rollouts_started", "Rollouts accepted.", registry=registry)
        self._resumed = Counter("rollcage_rollouts_resumed", "Rollouts of dead servers begun anew.", registry=registry)
        self._ended = Counter("rollcage_rollouts_ended", "Rollouts that ended.", ["outcome"], registry=registry)
        self._stages = Histogram(
            "rollcage_stage_seconds", "How long stages took.", ["stage"], buckets=SECONDS, registry=registry
        )
        self._turns = Counter("rollcage_turns", "Model calls.", ["purpose", "whole"], registry=registry)
        self._latency = Histogram(
            "rollcage_turn_seconds", "How long model calls took.", buckets=SECONDS, registry=registry
        )
        self._tokens = Counter("rollcage_tokens", "Tokens of model calls.", ["kind"], registry=registry)
        self._requests = Counter(
            "rollcage_http_requests", "HTTP requests answered.", ["method", "route", "status"], registry=registry
        )

    def on_event(self, rollout_id: str, event: Event) -> None:
        """One more event of a rollout of this process."""
        match event:
            case Queued():
                self._started.inc()
            case Requeued():
                self._resumed.inc()
            case StageEnded(stage=stage, seconds=seconds):
                self._stages.labels(stage.value).observe(seconds)
            case TurnEnded(turn=turn):
                whole = turn.error is None and turn.status == 200
                self._turns.labels(turn.purpose.value, str(whole).lower()).inc()
                self._latency.observe(turn.seconds)
                prompt, completion = (turn.usage.get(f"{name}_tokens") for name in ("prompt", "completion"))
                self._count("prompt", prompt if prompt is not None else len(turn.prompt_ids))
                self._count("completion", completion if completion is not None else len(turn.tokens))
            case Ended(outcome=outcome):
                self._ended.labels(outcome.value).inc()
            case _:
                pass

    def answered(self, method: str, route: str, status: int) -> None:
        """One more HTTP request."""
        self._requests.labels(method, route, str(status)).inc()

    def page(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def _count(self, kind: str, number: object) -> None:
        # The engine's own word: it may be anything.
        if isinstance(number, int) and 0 <= number < 1 << 40:
            self._tokens.labels(kind).inc(number)


class _Nodes(Collector):
    """What each node of a cluster is busy with, at the moment it is asked."""

    def __init__(self, nodes: Callable[[], Sequence[NodeView]]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family per number."""
        nodes = self._nodes()
        for name, about, value in (
            ("places", "Rollouts that may run on a node at once.", lambda node: node.places),
            ("rollouts", "Rollouts that run on a node.", lambda node: node.running),
            ("calls", "Model calls that run on a node.", lambda node: node.calls),
            ("load", "A node's load average over one minute.", lambda node: node.load),
            ("ready", "1 where a node takes rollouts.", lambda node: float(node.state == "ready")),
        ):
            family = GaugeMetricFamily(f"rollcage_node_{name}", about, labels=["node", "address"])
            for node in nodes:
                family.add_metric([node.id, node.address], value(node))
            if nodes:
                yield family
