"""Which processes run rollouts, and whether they still live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollcage.locks import claim, is_claimed
from rollcage.store import Store


class Owners:
    """Which processes run rollouts: each holds a lock on a file of its own, and the kernel lets go of it at death."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, store: Store) -> Owners:
        """The owners of the rollouts in this log."""
        return cls(store.path.parent / "owners")

    @contextmanager
    def hold(self) -> Iterator[str]:
        """A new owner, alive while the block (or this process) lasts."""
        owner = claim(self._folder)
        try:
            yield owner.path.name
        finally:
            owner.release()

    def socket(self, name: str) -> Path:
        """Where that owner tells what its models say."""
        return self._folder / f"{name}.live"

    def alive(self, name: str) -> bool:
        """Whether that owner's process still lives."""
        if not name or is_claimed(self._folder / name):
            return bool(name)
        for left in (self._folder / name, self.socket(name)):
            left.unlink(missing_ok=True)
        return False
