"""Layers are built once, whole, and whoever builds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from rollcage.sandboxes.layers import Layer, LayerStore

OWNER = 61234 if os.geteuid() == 0 else None


def _layer(built: list[Path], key: str = "1") -> Layer:
    async def build(folder: Path) -> None:
        built.append(folder)
        (folder / "half").write_text("half")
        await anyio.sleep(0.1)
        (folder / "sub").mkdir(mode=0o700)
        (folder / "sub" / "file").write_text("whole")
        (folder / "out").symlink_to("/etc/passwd")

    return Layer("some thing", key, build)


async def test_a_layer_is_built_once_however_many_ask_for_it(tmp_path: Path) -> None:
    built: list[Path] = []
    stores = [LayerStore(tmp_path / "layers", owner=OWNER) for _ in range(3)]
    found: list[Path] = []

    async def ask(store: LayerStore) -> None:
        found.append(await store.ensure(_layer(built)))

    async with anyio.create_task_group() as tasks:
        for store in stores * 3:
            tasks.start_soon(ask, store)
    assert len(built) == 1 and len(set(found)) == 1
    assert found[0].parent == tmp_path / "layers"
    assert (found[0] / "sub" / "file").read_text() == "whole"
    assert await stores[0].ensure(_layer(built)) == found[0] and len(built) == 1
    assert await stores[0].ensure(_layer(built, "2")) != found[0] and len(built) == 2


async def test_a_layer_belongs_to_the_boxes_user_and_links_are_not_followed(tmp_path: Path) -> None:
    folder = await LayerStore(tmp_path, owner=OWNER).ensure(_layer([]))
    owner = os.geteuid() if OWNER is None else OWNER
    assert {path.lstat().st_uid for path in (folder, *folder.rglob("*"))} == {owner}
    assert Path("/etc/passwd").stat().st_uid == 0


async def test_a_build_that_fails_or_is_cancelled_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    store = LayerStore(tmp_path, owner=OWNER)

    async def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await store.ensure(Layer("some thing", "1", fail))
    with anyio.move_on_after(0.05) as scope:
        await store.ensure(_layer([]))
    assert scope.cancelled_caught
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert (await store.ensure(_layer([])) / "sub" / "file").exists()


def test_what_a_killed_builder_left_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    program = """
import anyio, sys
from pathlib import Path
from rollcage.sandboxes.layers import Layer, LayerStore
async def build(folder):
    (folder / "stale").write_text("x")
    print("building", flush=True)
    await anyio.sleep(100)
anyio.run(LayerStore(Path(sys.argv[1])).ensure, Layer("some thing", "1", build))
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"building\n"
    assert list(tmp_path.rglob("stale"))
    child.send_signal(signal.SIGKILL)
    child.wait()
    folder = anyio.run(LayerStore(tmp_path, owner=OWNER).ensure, _layer([]))
    assert sorted(path.name for path in folder.iterdir()) == ["half", "out", "sub"]
    assert not list(tmp_path.rglob("stale"))
