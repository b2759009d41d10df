"""Limits hold, or the box says that they do not: each note begins with the name of the limit it is about."""

from __future__ import annotations

from rollcage.conformance.sandboxes.values import BoxSubject, Failed, Family, NotApplicable, expect, python, said, same
from rollcage.errors import SandboxError
from rollcage.sandboxes.base import Sandbox, sh
from rollcage.types import HOME

family = Family("limits", excusable=True)


def _held(box: Sandbox, limit: str, holds: bool, seen: str) -> None:
    """A limit that does not hold is excused by a note of the box about it, and by nothing else."""
    if holds:
        return
    for note in box.notes:
        if note.startswith(limit):
            raise NotApplicable(note)
    raise Failed(f"{seen}, and box.notes does not say so")


async def _still_works(box: Sandbox) -> None:
    same((await sh(box, "echo alive")).stdout.text, "alive\n", "the next command said")


@family.check("pids: a fork bomb stops at its limit, the box answers the next command, other boxes do not notice")
async def pids(subject: BoxSubject) -> None:
    script = r"""
import os, sys, time
n = 0
try:
    while n < 400:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        n += 1
except OSError: pass
print(n, flush=True)
"""
    async with subject.open(pids=64) as box, subject.open(pids=64) as other:
        count = int(await said(box, script))
        _held(box, "pids", count <= 64 + 16, f"{count} processes at once where 64 are allowed")
        expect(count >= 40, f"only {count} processes could be started where 64 are allowed")
        await _still_works(box)
        bomb = await sh(box, ":(){ :|:& };:; sleep 0.5; echo over", timeout_s=3)
        expect(bomb.seconds < 30, "a fork bomb could not be ended")
        await _still_works(box)
        same(int(await said(other, script)) >= 40, True, "whether another box has its own number of processes")


@family.check("memory: one process gets no more than its box has, and reserving address space is not using it")
async def memory(subject: BoxSubject) -> None:
    take = "b = bytearray(400 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nprint('taken')"
    async with subject.open(memory_mb=256) as box:
        ran = await python(box, take)
        _held(box, "memory", "taken" not in ran.stdout.text, "a process took 400 MB where 256 are allowed")
        reserve = "import mmap; mmap.mmap(-1, 60 << 30, flags=0x4022, prot=0); print('reserved')"
        same((await python(box, reserve)).stdout.text, "reserved\n", "a process that only reserves memory said")
        await _still_works(box)


@family.check("memory: all processes together get no more than their box has")
async def memory_together(subject: BoxSubject) -> None:
    script = r'''
import subprocess, sys
take = """
import sys
b = bytearray(90 << 20)
for i in range(0, len(b), 4096): b[i] = 1
print(1, flush=True)
sys.stdin.read()
"""
start = lambda: subprocess.Popen([sys.executable, "-c", take], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
children = [start() for _ in range(5)]
for child in children: child.stdout.readline()
print(sum(child.poll() is None for child in children))
'''
    async with subject.open(memory_mb=200) as box:
        ran = await python(box, script)
        # Whoever is killed for it may also be the one who counts.
        holding = 0 if ran.code == 137 else int(ran.stdout.text)
        _held(box, "memory", holding <= 2, f"{holding} processes hold 90 MB each where 200 are allowed for all")
        await _still_works(box)


@family.check("cpus: a loop gets no more processor time than its box has")
async def cpus(subject: BoxSubject) -> None:
    # Of the loop alone: on a slow machine an interpreter needs more than that to start.
    burn = (
        "import time\nbegan, end = time.process_time(), time.time() + 1.5\n"
        "while time.time() < end: pass\nprint(time.process_time() - began)"
    )
    async with subject.open(cpus=0.2) as box:
        used = float(await said(box, burn))
        _held(box, "cpus", used < 0.9, f"{used:.2f} s of processor time in 1.5 s where 0.3 are allowed")


async def _fill(box: Sandbox, limit: str, folder: str, most: int) -> None:
    """Write until nothing more goes; then there are no more megabytes than `most`."""
    script = f"for i in 1 2 3 4 5 6; do head -c 9M /dev/zero > {folder}/fill$i || break; done; du -sm {folder}"
    ran = await sh(box, script)
    if ran.code == 137:
        _held(box, limit, False, "who wrote too much was killed, where a write should be refused")
    size = int(ran.stdout.text.split()[0])
    _held(box, limit, size <= most, f"{size} MB were written to {folder} where no more than {most} should fit")


@family.check("disk: home takes so much and no more; then a write is a clear error, and with room again it works")
async def disk(subject: BoxSubject) -> None:
    async with subject.open(disk_mb=20) as box:
        await _fill(box, "disk", HOME, 22)
        try:
            await box.write(f"{HOME}/more", b"x" * (4 << 20))
        except SandboxError as error:
            expect("full" in str(error) or "space" in str(error), f"the error does not say why: {error}")
        else:
            raise Failed("a write of 4 MB into a full home went through")
        same((await sh(box, "ls ~ | grep -c more")).stdout.text, "0\n", "files the failed write left")
        await sh(box, "rm ~/fill*")
        await box.write(f"{HOME}/more", b"x" * (4 << 20))


@family.check("tmp: /tmp and /dev/shm take so much and no more")
async def tmp(subject: BoxSubject) -> None:
    async with subject.open(tmp_mb=5) as box:
        for folder in ("/tmp", "/dev/shm"):  # noqa: S108 (paths in the box)
            await _fill(box, "tmp", folder, 7)
            await sh(box, f"rm -f {folder}/fill*")


@family.check("file: one file takes so much and no more")
async def file(subject: BoxSubject) -> None:
    async with subject.open(file_mb=10, disk_mb=64) as box:
        ran = await sh(box, "head -c 15M /dev/zero > ~/large; stat -c %s ~/large")
        _held(
            box,
            "file",
            int(ran.stdout.text) <= 10 << 20,
            f"a file has {ran.stdout.text.strip()} bytes, 10 MB are allowed",
        )
