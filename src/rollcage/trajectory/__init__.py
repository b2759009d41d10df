"""From turns to what trainers take: `sequences(rollout)` merges, `report(rollout)` says how well that went."""

from rollcage.trajectory.merge import POLICY, sequences
from rollcage.trajectory.report import MergeReport, report
from rollcage.trajectory.sequence import Break, Sequence, Shifted, Split

__all__ = ["POLICY", "Break", "MergeReport", "Sequence", "Shifted", "Split", "report", "sequences"]
