"""The log on disk: one SQLite file to which every rollout's events are appended, and from which everything is read."""

from rollcage.store.store import Store
from rollcage.store.summaries import Query, Summary

__all__ = ["Query", "Store", "Summary"]
