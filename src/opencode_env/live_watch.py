"""The summary of a session, by its older published place."""

from opencode_env.summary import RolloutSummary, collect_rollout_summary, print_rollout_summary

__all__ = ["RolloutSummary", "collect_rollout_summary", "print_rollout_summary"]
