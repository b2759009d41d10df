"""From turns to what trainers take: `sequences(rollout)` merges, `report(rollout)` says how well that went."""

from rollcage.trajectory.merge import sequences
from rollcage.trajectory.report import MergeReport, report
from rollcage.trajectory.sequence import Break, Sequence, Shifted, Split
from rollcage.types import POLICY

__all__ = ["POLICY", "Break", "MergeReport", "Sequence", "Shifted", "Split", "report", "sequences"]
