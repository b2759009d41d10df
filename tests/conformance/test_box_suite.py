"""The local sandbox holds all that a backend must hold; and the suite finds out those that do not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import anyio
import pytest

from rollcage.conformance.sandboxes import CHECKS, CheckVerdict, ConformanceCheck, Traits, check, chosen, judge
from rollcage.conformance.sandboxes.backends import traits_of
from rollcage.errors import SandboxLost, UsageError
from rollcage.sandboxes.base import Process, Sandbox, SpawnOptions
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.sandboxes.plain import PlainBox
from rollcage.types import SandboxSpec
from support.boxes import ROOT


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(tmp_path_factory.mktemp("state")) as opened:
        yield opened


@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.name)
async def test_local_boxes_hold_what_every_box_must(provider: LocalProvider, one: ConformanceCheck) -> None:
    verdict = await judge(one, provider, replace(traits_of(provider), pace=4))
    # Without cgroups only these two limits are beyond us, and then each box says so.
    beyond_us = not ROOT and one.name in ("limits.memory_together", "limits.cpus")
    assert verdict.outcome == "passed" or (verdict.outcome == "not_applicable" and beyond_us), verdict.detail


def test_every_check_has_a_name_of_its_own_and_says_what_must_hold() -> None:
    assert len({one.name for one in CHECKS}) == len(CHECKS)
    assert all(len(one.holds) > 20 and not one.holds.endswith(".") for one in CHECKS)
    assert {one.family for one in CHECKS if one.excusable} == {"rewind", "limits", "hardening"}


def test_checks_are_chosen_by_name_or_family() -> None:
    assert [one.name for one in chosen(["files.binary"])] == ["files.binary"]
    assert {one.family for one in chosen(["files", "limits.disk"])} == {"files", "limits"}
    assert chosen() == CHECKS
    with pytest.raises(UsageError, match="no check or family is called 'nothing'; the families are files, "):
        chosen(["files", "nothing"])


class Faulty(LocalProvider):
    """A backend whose boxes are made by the class it is given."""

    def __init__(self, folder: Path, kind: type[PlainBox] = PlainBox, **spec: Any) -> None:
        super().__init__(folder)
        self._kind, self._spec = kind, spec

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Any]:
        async with super().open(spec.model_copy(update=self._spec), layers) as box:
            yield self._kind(box)


class HangsOnRead(PlainBox):
    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        if path.endswith("fifo"):
            await anyio.sleep_forever()
        return await self._box.read(path, limit=limit)


class AddsToEnvironment(PlainBox):
    def spawn(self, argv: Sequence[str], **options: Unpack[SpawnOptions]) -> AbstractAsyncContextManager[Process]:
        options["env"] = {**(options.get("env") or {}), "SHLVL": "1"}
        return self._box.spawn(argv, **options)


class LeavesRunning(PlainBox):
    @asynccontextmanager
    async def spawn(self, argv: Sequence[str], **options: Unpack[SpawnOptions]) -> AsyncIterator[Process]:
        later = AsyncExitStack()
        yield await later.enter_async_context(self._box.spawn(argv, **options))
        await later.aclose() if "-I" not in argv else None


class Clips(PlainBox):
    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        return (await self._box.read(path, limit=limit)).rstrip(b"\xff")


class SaysNothing(PlainBox):
    @property
    def notes(self) -> tuple[str, ...]:
        return ()


class SaysSo(PlainBox):
    @property
    def notes(self) -> tuple[str, ...]:
        return ("pids: not bounded here", "disk: as large as the machine's")


async def _judged(provider: LocalProvider, name: str, traits: Traits | None = None) -> CheckVerdict:
    async with provider:
        [one] = chosen([name])
        return await judge(one, provider, traits or traits_of(provider))


@pytest.mark.parametrize(
    ("kind", "name", "seen"),
    [
        (HangsOnRead, "files.missing", "hung|no end within"),
        (AddsToEnvironment, "processes.environment", "SHLVL"),
        (LeavesRunning, "processes.daemons", "still"),
        (Clips, "files.binary", "read back"),
    ],
)
async def test_a_faulty_backend_is_found_out(tmp_path: Path, kind: type[PlainBox], name: str, seen: str) -> None:
    pace = 0.03 if kind is HangsOnRead else 0.3
    verdict = await _judged(Faulty(tmp_path, kind), name, Traits(pace=pace))
    assert verdict.outcome == "failed"
    assert any(word in verdict.detail for word in seen.split("|")), verdict.detail


async def test_a_limit_that_is_not_enforced_is_excused_by_an_honest_note_and_by_nothing_else(tmp_path: Path) -> None:
    verdict = await _judged(Faulty(tmp_path, SaysNothing, pids=4096, disk_mb=64), "limits.disk")
    assert verdict.outcome == "failed" and "box.notes does not say so" in verdict.detail
    verdict = await _judged(Faulty(tmp_path, SaysSo, pids=4096, disk_mb=64), "limits.disk")
    assert (verdict.outcome, verdict.detail) == ("not_applicable", "disk: as large as the machine's")


class OneForAll(LocalProvider):
    """Gives the same box to everybody."""

    _shared: Any = None

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Any]:
        if self._shared is None:
            self._shared = await super().open(spec, layers).__aenter__()
        yield self._shared


@pytest.mark.parametrize(
    "name", ["isolation.other_boxes", "lifecycle.fresh", "lifecycle.close_twice", "layers.changes"]
)
async def test_a_box_that_is_not_new_is_found_out(tmp_path: Path, name: str) -> None:
    async with OneForAll(tmp_path) as provider, provider.open(SandboxSpec()) as box:
        [one] = chosen([name])
        assert (await judge(one, provider)).outcome == "failed"
        await box.close()


class NeverCloses(LocalProvider):
    """Hangs when a box is left, whatever happens."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.end = anyio.Event()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Any]:
        async with super().open(spec, layers) as box:
            try:
                yield box
            finally:
                with anyio.CancelScope(shield=True):
                    await self.end.wait()


async def test_a_backend_that_hangs_does_not_hang_the_suite(tmp_path: Path) -> None:
    async with NeverCloses(tmp_path) as provider:
        verdicts = [
            verdict async for verdict in check(provider, traits=Traits(pace=0.015), only=["files.limit", "files.mode"])
        ]
        provider.end.set()
    assert [verdict.outcome for verdict in verdicts] == ["failed", "failed"]
    assert "it hung" in verdicts[0].detail


async def test_nothing_excuses_isolation_and_without_a_way_to_lose_a_box_loss_counts_as_failed(tmp_path: Path) -> None:
    verdict = await _judged(LocalProvider(tmp_path), "lifecycle.lost", Traits(own_kernel=True))
    assert verdict.outcome == "failed" and "no way to lose a box" in verdict.detail
    verdict = await _judged(LocalProvider(tmp_path), "hardening.mounts", Traits(own_kernel=True))
    assert verdict.outcome == "not_applicable" and "kernel of its own" in verdict.detail
    verdict = await _judged(LocalProvider(tmp_path), "isolation.network", Traits(own_kernel=True))
    assert verdict.outcome == "passed"


async def test_cancelling_the_suite_ends_the_check_that_runs(tmp_path: Path) -> None:
    boxes: list[Sandbox] = []

    class Watched(PlainBox):
        def __init__(self, box: Sandbox) -> None:
            super().__init__(box)
            boxes.append(box)

    async with Faulty(tmp_path, Watched) as provider:
        async with anyio.create_task_group() as tasks:
            [one] = chosen(["processes.timeouts"])
            tasks.start_soon(judge, one, provider)
            while not boxes:
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        with pytest.raises(SandboxLost):
            await boxes[0].read("/x")
