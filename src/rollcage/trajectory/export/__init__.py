"""Rollouts as files: rows of five formats (`rows`), written and read as JSON lines or parquet (`files`)."""

from rollcage.trajectory.export.columns import COLUMNS, Format
from rollcage.trajectory.export.files import load, open_export
from rollcage.trajectory.export.rows import rows_of

__all__ = ["COLUMNS", "Format", "load", "open_export", "rows_of"]
