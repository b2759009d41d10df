"""Boxes open, close and get lost without hanging, without surprises and without leaving anything."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import anyio

from rollcage.conformance.sandboxes.daemons import Swarm, until
from rollcage.conformance.sandboxes.values import BoxSubject, Failed, Family, expect, same
from rollcage.errors import SandboxLost
from rollcage.sandboxes.base import Sandbox, sh
from rollcage.types import HOME

family = Family("lifecycle")

_SOON_S = 30


async def _listening(box: Sandbox) -> None:
    async with box.listen(7000):
        pass


_USES: dict[str, Callable[[Sandbox], Awaitable[object]]] = {
    "read": lambda box: box.read(f"{HOME}/file"),
    "write": lambda box: box.write(f"{HOME}/file", b"x"),
    "spawn": lambda box: sh(box, "true"),
    "listen": _listening,
}


async def _all_uses_are_lost(box: Sandbox) -> None:
    for name, use in _USES.items():
        try:
            with anyio.fail_after(_SOON_S):
                await use(box)
        except SandboxLost as error:
            expect(str(error), f"the error of {name} says nothing")
        except TimeoutError:
            raise Failed(f"{name} hangs") from None
        except Exception as error:
            raise Failed(f"{name} raised {type(error).__name__} ({error}), not SandboxLost") from error
        else:
            raise Failed(f"{name} works in a box that is gone")


class _Waiter:
    """Waits for a command and keeps how that ended."""

    def __init__(self) -> None:
        self.begun, self._over = anyio.Event(), anyio.Event()
        self._told = "nothing: it hangs"

    async def watch(self, box: Sandbox, argv: list[str]) -> None:
        """Run a command that prints `up` and does not end."""
        async with box.spawn(argv) as process:
            await until(process, b"up\n")
            self.begun.set()
            try:
                self._told = f"exit code {await process.wait()}"
            except SandboxLost as error:
                self._told = f"SandboxLost: {error}"
            self._over.set()

    async def was_told(self) -> None:
        """Fail unless it gets SandboxLost, and soon."""
        with anyio.move_on_after(_SOON_S):
            await self._over.wait()
        expect(self._told.startswith("SandboxLost: "), f"`wait` ended with {self._told}")


@family.check("a box is new: home holds nothing but its layers, and each box has an id of its own")
async def fresh(subject: BoxSubject) -> None:
    ids = set()
    for _ in range(2):
        async with subject.open() as box:
            same((await sh(box, "ls -A ~ /tmp")).stdout.text, f"{HOME}:\n\n/tmp:\n", "a new box's folders")
            await sh(box, "touch ~/mine /tmp/mine ~/.hidden")
            ids.add(box.id)
            expect(box.id, "the box has no id")
            expect(all(note.partition(":")[1] for note in box.notes), f"notes that name no limit: {box.notes}")
    same(len(ids), 2, "ids of two boxes")


@family.check("closing a busy box ends its commands at once, and those who wait for them get SandboxLost")
async def close_while_busy(subject: BoxSubject) -> None:
    waiters = [_Waiter() for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        async with subject.open() as box:
            swarm = Swarm(box)
            tasks.start_soon(waiters[0].watch, box, swarm.argv())
            for waiter in waiters[1:]:
                tasks.start_soon(waiter.watch, box, ["bash", "-c", "echo up; sleep 1000"])
            for waiter in waiters:
                await waiter.begun.wait()
        for waiter in waiters:
            await waiter.was_told()
        swarm.none_on_this_machine()


@family.check("a closed box says SandboxLost to whatever is asked of it, and closing it again does nothing")
async def close_twice(subject: BoxSubject) -> None:
    opening = subject.provider.open(subject.spec())
    box = await opening.__aenter__()
    same((await sh(box, "echo open")).stdout.text, "open\n", "a command said")
    await opening.__aexit__(None, None, None)
    await _all_uses_are_lost(box)
    await opening.__aexit__(None, None, None)
    await _all_uses_are_lost(box)


@family.check("a listener and a command of a box that is closed first can still be left quietly")
async def close_inside_out(subject: BoxSubject) -> None:
    opening = subject.provider.open(subject.spec())
    box = await opening.__aenter__()
    with anyio.fail_after(2 * _SOON_S):
        async with box.listen(7000), box.spawn(["sleep", "1000"]):
            await opening.__aexit__(None, None, None)
    await _all_uses_are_lost(box)


@family.check("a box that is lost says SandboxLost: to those who wait, to whatever is asked; the next box works")
async def lost(subject: BoxSubject) -> None:
    lose = subject.traits.lose
    if lose is None:
        raise Failed("the backend's traits name no way to lose a box, so this could not be tried")
    waiter = _Waiter()
    async with subject.open() as box:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiter.watch, box, ["bash", "-c", "echo up; sleep 1000"])
            await waiter.begun.wait()
            await lose(box)
            await waiter.was_told()
        await _all_uses_are_lost(box)
    async with subject.open() as box:
        same((await sh(box, "echo again")).stdout.text, "again\n", "the next box said")


@family.check("giving up while a box is being opened leaves nothing, and the next box works")
async def cancelled_opening(subject: BoxSubject) -> None:
    for delay in (0, 0.002, 0.01, 0.05):
        with anyio.move_on_after(delay * subject.traits.pace):
            async with subject.open():
                await anyio.sleep_forever()
    async with subject.open() as box:
        same((await sh(box, "echo works")).stdout.text, "works\n", "the next box said")


@family.check("boxes that come and go leave no descriptor behind in our process")
async def descriptors(subject: BoxSubject) -> None:
    async def once() -> None:
        async with subject.open() as box, box.listen(7000):
            await sh(box, "cat", timeout_s=30)

    rounds = 8
    await once()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (no Path is wanted)
    for _ in range(rounds):
        await once()
    grown = len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208
    expect(grown < rounds, f"{grown} more descriptors after {rounds} more boxes")


@family.check("fifty boxes at once work, and none sees another's files", deadline_s=100)
async def fifty(subject: BoxSubject) -> None:
    seen: dict[str, str] = {}
    few = anyio.CapacityLimiter(8)
    written = 0
    all_written = anyio.Event()

    async def live(number: int) -> None:
        nonlocal written
        async with few:
            opening = subject.provider.open(subject.spec(memory_mb=256, disk_mb=32))
            box = await opening.__aenter__()
        try:
            async with few:
                await box.write(f"{HOME}/mine", str(number).encode())
            written += 1
            if written == 50:
                all_written.set()
            await all_written.wait()
            async with few:
                seen[box.id] = (await sh(box, "cat ~/mine; echo; ls -A ~")).stdout.text
        finally:
            with anyio.CancelScope(shield=True):
                async with few:
                    await opening.__aexit__(None, None, None)

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(live, number)
    same(sorted(seen.values()), sorted(f"{number}\nmine\n" for number in range(50)), "what the boxes said")
