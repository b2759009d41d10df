"""A log over months: pruned, vacuumed, backed up, copied between machines, read where nothing can be written."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from rollcage.errors import LogDamaged, StoreError, UsageError
from rollcage.events import AgentEmitted, Ended, Entry, Event, Queued, TurnEnded, WorkStored
from rollcage.store import Store
from rollcage.store.batches import add_to_batch, batch_log, batch_names
from rollcage.store.copying import backup, copy_rollouts
from rollcage.store.repair import check_whole
from rollcage.store.retention import Prune, pin, prune, size_of, vacuum
from rollcage.types import BatchPlace, Endpoint, FileTree, Job, Outcome, Task
from support.commands import rollcage
from support.turns import turn

JOB = Job(task=Task(instruction="x" * 2000), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))


@pytest.fixture
async def old(tmp_path: Path) -> AsyncIterator[Store]:
    """Ten ended rollouts that share content, each with an archive of its own, and one that is open."""
    (tmp_path / "state").mkdir()
    async with Store.open(tmp_path / "state" / "rollouts.db") as store:
        for number in range(10):
            await add(store, f"r{number}", tmp_path / "state" / "work", group="g" if number in (2, 3) else "")
        await store.append("open", Queued(job=JOB, owner=""))
        yield store


async def add(store: Store, name: str, work: Path, group: str = "") -> None:
    digest = (name.encode().hex() + "0" * 32)[:32]
    archive = work / digest[:2] / f"{digest}.tar.zst"
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(os.urandom(5000))
    os.utime(archive, (1, 1))
    events: list[Event] = [
        Queued(job=JOB.model_copy(update={"group_id": group})),
        TurnEnded(turn=turn(0, range(2000), range(len(name) * 1000))),
        AgentEmitted(raw={"own": os.urandom(20_000).hex(), "shared": "s" * 5000}),
        WorkStored(digest=digest, paths=("a",), size=5000),
        Ended(outcome=Outcome.FINISHED),
    ]
    for event in events:
        await store.append(name, event)


async def logs(store: Store) -> dict[str, list[Entry]]:
    return {row.id: await store.read(row.id) for row in await store.list(limit=100)}


def archives(home: Path) -> set[str]:
    return {bytes.fromhex(path.name[:4]).decode() for path in home.glob("work/*/*.zst")}


async def test_pruning_takes_what_is_old_and_leaves_what_is_pinned_open_or_shared(old: Store) -> None:
    home = old.path.parent
    before = await logs(old)
    with pytest.raises(UsageError, match="nothing says which"):
        prune(old.path, home / "work", Prune())
    pin(old.path, ["r1"])
    planned = prune(old.path, home / "work", Prune(older_than_s=0), dry_run=True)
    assert len(planned.rollouts) == 9
    assert await logs(old) == before
    done = prune(old.path, home / "work", Prune(group="g"))
    assert done.rollouts == ("r2", "r3")
    assert done.blobs > 0
    assert await logs(old) == {name: log for name, log in before.items() if name not in ("r2", "r3")}
    assert archives(home) == {f"r{n}" for n in (0, 1, 4, 5, 6, 7, 8, 9)}
    done = prune(old.path, home / "work", Prune(older_than_s=0))
    assert (done.kept_pinned, len(done.rollouts)) == (1, 7)
    assert await logs(old) == {name: before[name] for name in ("r1", "open")}
    assert archives(home) == {"r1"}
    with sqlite3.connect(old.path) as connection, pytest.raises(sqlite3.IntegrityError, match="never deleted"):
        connection.execute("DELETE FROM entries")
    connection.close()


async def test_files_of_tasks_go_with_the_last_rollout_that_needs_them(old: Store) -> None:
    home = old.path.parent
    paths = {}
    for name in ("shared", "own", "nobody", "young"):
        digest = (name.encode().hex() + "0" * 32)[:32]
        paths[name] = home / "trees" / digest[:2] / f"{digest}.tar.zst"
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        paths[name].write_bytes(b"x" * 100)
        if name != "young":
            os.utime(paths[name], (1, 1))

    def job(**trees: str) -> Job:
        brought = {key: FileTree(digest=paths[name].name[:32], size=1, files=1) for key, name in trees.items()}
        files = {"tests_tree": brought.get("tests"), "trees": {"data": brought["data"]} if "data" in brought else {}}
        return JOB.model_copy(update={"group_id": "t", "task": Task.model_validate({"instruction": "x", **files})})

    await old.append("both", Queued(job=job(tests="shared", data="own")))
    await old.append("both", Ended(outcome=Outcome.FINISHED))
    await old.append("waiting", Queued(job=job(tests="shared")))
    done = prune(old.path, home / "work", Prune(group="t"), trees=home / "trees")
    assert (done.rollouts, done.tree_files, done.tree_bytes) == (("both",), 2, 200)
    assert {name for name, path in paths.items() if path.exists()} == {"shared", "young"}


async def test_a_batch_is_pruned_by_its_name(old: Store) -> None:
    place = BatchPlace(name="nightly", cell="c", task="t", digest="d", model="m", agent="shell", sample=1)
    await old.append("in-batch", Queued(job=JOB, batch=place))
    await old.append("in-batch", Ended(outcome=Outcome.FINISHED))
    await add_to_batch(old, "nightly", "planned", {"name": "nightly"})
    await add_to_batch(old, "later", "planned", {"name": "later"})
    assert prune(old.path, old.path.parent / "work", Prune(group="nightly")).rollouts == ("in-batch",)
    assert [name for name, _ in await batch_names(old)] == ["later"], "it goes with its last rollout; others stay"
    with closing(sqlite3.connect(old.path)) as connection, pytest.raises(sqlite3.IntegrityError, match="never deleted"):
        connection.execute("DELETE FROM batch_entries")


async def test_a_batch_comes_in_with_its_rollouts_and_none_is_mixed_with_another(old: Store, tmp_path: Path) -> None:
    place = BatchPlace(name="nightly", cell="c", task="t", digest="d", model="m", agent="shell", sample=1)
    await old.append("in-batch", Queued(job=JOB, batch=place))
    await old.append("in-batch", Ended(outcome=Outcome.FINISHED))
    await add_to_batch(old, "nightly", "planned", {"name": "nightly"})
    target = tmp_path / "target"
    async with Store.open(target / "rollouts.db") as there:
        copy_rollouts(old.path.parent, target, ["in-batch"])
        assert [entry.kind for entry in await batch_log(there, "nightly")] == ["planned"]
        await add_to_batch(old, "nightly", "done")
        copy_rollouts(old.path.parent, target, ["in-batch"])
        assert [entry.kind for entry in await batch_log(there, "nightly")] == ["planned", "done"]
    other = tmp_path / "other"
    async with Store.open(other / "rollouts.db") as there:
        await add_to_batch(there, "nightly", "planned", {"name": "nightly", "n": 7})
        with pytest.raises(StoreError, match="another batch nightly"):
            copy_rollouts(old.path.parent, other, ["in-batch"])
        assert await there.list() == []


async def test_a_writer_that_remembers_pruned_content_stores_it_again(old: Store) -> None:
    home = old.path.parent
    before = await old.read("r5")
    prune(old.path, home / "work", Prune(older_than_s=0))
    for entry in before:  # this store has written the same content before, and need not look for it
        await old.append("anew", entry.event)
    assert [entry.event for entry in await old.read("anew")] == [entry.event for entry in before]


async def test_pruning_beside_a_busy_writer_loses_nothing_of_it(old: Store) -> None:
    home = old.path.parent
    shared = [(await old.read("r0"))[2].event, (await old.read("r0"))[1].event]
    written: list[str] = []
    stop = anyio.Event()

    async def write() -> None:
        while not stop.is_set():
            name = f"new{len(written)}"
            for event in (Queued(job=JOB), *shared):
                await old.append(name, event)
            written.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        for _ in range(5):
            at = len(written)
            await anyio.to_thread.run_sync(lambda: prune(old.path, home / "work", Prune(older_than_s=0)))
            while len(written) < at + 2:
                await anyio.sleep(0.005)
        stop.set()
    for name in written:
        assert [entry.event for entry in await old.read(name)][1:] == shared


async def test_pruning_to_a_size_takes_the_oldest_and_vacuum_gives_the_space_back(old: Store) -> None:
    home = old.path.parent
    size = size_of(old.path, home / "work")
    assert (size.rollouts, size.work_files) == (11, 10)
    whole, _ = vacuum(old.path)
    done = prune(old.path, home / "work", Prune(max_bytes=whole // 2))
    assert 0 < len(done.rollouts) < 10
    assert done.rollouts == tuple(f"r{n}" for n in range(len(done.rollouts)))
    before, after = vacuum(old.path)
    assert after < before
    assert after <= whole * 0.6
    assert prune(old.path, home / "work", Prune(max_bytes=whole)).rollouts == ()


async def test_a_backup_is_a_state_folder_of_one_moment(old: Store, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    before = await logs(old)
    async with anyio.create_task_group() as tasks:

        async def write() -> None:
            for number in range(50):
                await old.append(f"late{number}", Queued(job=JOB))
                await old.append(f"late{number}", Ended(outcome=Outcome.FINISHED))

        tasks.start_soon(write)
        done = await anyio.to_thread.run_sync(backup, old.path, old.path.parent / "work", copy)
    assert done.work_files == 10
    async with Store.open(copy / "rollouts.db") as store:
        found = await logs(store)
    assert before.items() <= found.items()
    assert archives(copy) == archives(old.path.parent)
    with pytest.raises(UsageError, match="is there already"):
        backup(old.path, old.path.parent / "work", copy)


async def test_whole_rollouts_go_from_one_log_to_another(old: Store, tmp_path: Path) -> None:
    target = tmp_path / "other"
    before = await logs(old)
    async with Store.open(target / "rollouts.db") as other:
        await other.append("r9", Queued(job=JOB))
        done = copy_rollouts(old.path.parent, target, ["r1", "r2", "open"])
        assert (done.rollouts, done.open, done.work_files) == (("r1", "r2"), ("open",), 2)
        assert await other.read("r1") == before["r1"]
        assert (await other.summary("r1")) == (await old.summary("r1"))
        assert copy_rollouts(old.path.parent, target, ["r1"]).present == ("r1",)
        with pytest.raises(StoreError, match="r9 is in the target already"):
            copy_rollouts(old.path.parent, target)


async def test_commands_work_on_a_log_that_cannot_be_written(old: Store, tmp_path: Path) -> None:
    home = tmp_path / "state"
    async with Store.open(old.path, read_only=True) as store:
        assert len(await store.list()) == 11
        with pytest.raises(StoreError, match="read only"):
            await store.append("r0", Ended(outcome=Outcome.FINISHED))
    backup(old.path, home / "work", tmp_path / "frozen")
    frozen = tmp_path / "frozen"
    # Root may write anywhere, except where the disk itself refuses.
    script = f"mount --bind {frozen} {frozen} && mount -o remount,ro,bind {frozen} && exec"
    for command, word in (
        (["ls", "--json"], "r1"),
        (["show", "r1", "--json"], "r1"),
        (["show", "r1", "--events"], "work_stored"),
        (["export", "r1"], "r1"),
    ):
        under = ["unshare", "-rm", "sh", "-c", f'{script} "$@"', "sh"]
        shown = rollcage(tmp_path, *command, env={"ROLLCAGE_HOME": str(frozen)}, under=under)
        assert shown.returncode == 0, shown.stderr
        assert word in shown.stdout


async def test_an_empty_file_is_no_new_log(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.db"
    path.touch()
    with pytest.raises(LogDamaged, match="it is empty, and a log never is"):
        async with Store.open(path):
            pass
    assert path.stat().st_size == 0


@pytest.mark.parametrize("where", ["middle", "index", "blobs"])
async def test_what_is_readable_of_a_damaged_log_is_saved(tmp_path: Path, where: str) -> None:
    home = tmp_path / "state"
    async with Store.open(home / "rollouts.db") as store:
        for number in range(30):
            await add(store, f"r{number}", home / "work")
        await store.append("open", Queued(job=JOB))
        whole = await logs(store)
    vacuum(home / "rollouts.db")
    damage(home / "rollouts.db", where)
    if where != "blobs":  # what blobs hold is checked when it is read
        with pytest.raises(LogDamaged, match="doctor --repair"):
            check_whole(home / "rollouts.db")
        findings = json.loads(rollcage(tmp_path, "doctor", "--json").stdout)
        [found] = [each for each in findings["findings"] if each["name"] == "log"]
        assert not found["ok"]
        assert "damaged" in found["detail"]
        assert found["remedy"] == "save what is readable: rollcage doctor --repair"
    shown = rollcage(tmp_path, "doctor", "--repair", "--json")
    assert shown.returncode == 0, shown.stderr
    async with Store.open(home / "rollouts.db") as store:
        saved = await logs(store)
    same = [name for name, log in saved.items() if log == whole[name]]
    cut = [name for name in saved if name not in same]
    assert len(same) >= 20
    for name in cut:
        log = saved[name]
        assert log[:-1] == whole[name][: len(log) - 1]
        assert isinstance(log[-1].event, Ended)
        assert log[-1].event.error_code == "log_damaged"
    if where == "index":
        assert cut == []
    else:
        assert len(same) < 31, "nothing was damaged"
    assert list(home.glob("rollouts.db.damaged-*"))


def damage(path: Path, where: str) -> None:
    """Overwrite pages: of the entries, of an index, or of content."""
    with sqlite3.connect(path) as connection:
        name = {"middle": "entries", "index": "sqlite_autoindex_entries_1", "blobs": "blobs"}[where]
        pages = [row[0] for row in connection.execute("SELECT pageno FROM dbstat WHERE name = ?", (name,))]
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    connection.close()
    chosen = pages if where == "index" else pages[len(pages) // 2 :][:2]
    with path.open("r+b") as file:
        for page in chosen:
            file.seek((page - 1) * size)
            file.write(os.urandom(size))


async def test_an_archive_that_was_just_made_stays(old: Store) -> None:
    home = old.path.parent
    fresh = home / "work" / "ff" / ("f" * 32 + ".tar.zst")
    fresh.parent.mkdir()
    fresh.write_bytes(b"x")
    stale = home / "work" / "0000.part"
    stale.write_bytes(b"x")
    os.utime(stale, (1, 1))
    prune(old.path, home / "work", Prune(older_than_s=time.time()))
    assert fresh.exists()
    assert not stale.exists()
    shutil.rmtree(home / "work")
    assert prune(old.path, home / "work", Prune(older_than_s=0)).work_files == 0
