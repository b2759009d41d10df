"""From turns to what trainers take: `sequences(rollout)` merges, `report(rollout)` says how well that went."""

from rollcage.trajectory.merge import sequences
from rollcage.trajectory.report import MergeReport, MergeView, merge_view, report
from rollcage.trajectory.sequence import Break, Sequence, Shifted, Split
from rollcage.types import POLICY

__all__ = [
    "POLICY",
    "Break",
    "MergeReport",
    "MergeView",
    "Sequence",
    "Shifted",
    "Split",
    "merge_view",
    "report",
    "sequences",
]
