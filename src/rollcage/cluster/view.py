"""A word about the nodes, left beside the log by the head for `rollcage nodes`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rollcage.schema.nodes import NodeView

OLD_S = 30.0
"""A word that is older is of a head that is gone."""
_VIEWS = TypeAdapter(tuple[NodeView, ...])


def write_view(home: Path, nodes: Sequence[NodeView]) -> None:
    """Leave it."""
    path = _path(home)
    draft = path.with_suffix(".draft")
    with suppress(OSError):  # a full disk, say: the next word may fare better
        draft.write_bytes(_VIEWS.dump_json(tuple(nodes)))
        draft.replace(path)


def read_view(home: Path, now: float) -> tuple[tuple[NodeView, ...], float]:
    """The nodes, and how many seconds ago that was; none where no head is there."""
    path = _path(home)
    try:
        age = max(0.0, now - path.stat().st_mtime)
        return (_VIEWS.validate_json(path.read_bytes()) if age < OLD_S else ()), age
    except (OSError, ValidationError):
        return (), 0.0


def _path(home: Path) -> Path:
    return home / "cluster" / "nodes.json"
