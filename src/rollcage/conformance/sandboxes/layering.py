"""Layers: what a home starts with. Every box may change its own, and no other box ever sees that."""

from __future__ import annotations

from pathlib import Path

from rollcage.conformance.sandboxes.values import BoxSubject, Family, same
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.layers import Layer

family = Family("layers")


async def _bottom(folder: Path) -> None:
    (folder / "bin").mkdir(mode=0o700)
    (folder / "bin" / "tool").write_text("#!/bin/sh\necho tool\n")
    (folder / "bin" / "tool").chmod(0o700)
    (folder / "link").symlink_to("bin/tool")
    (folder / "shared").write_text("bottom")
    (folder / ".hidden é").write_text("hidden")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "file").write_text("deep")


async def _top(folder: Path) -> None:
    (folder / "shared").write_text("top")
    (folder / "deep").mkdir()
    (folder / "deep" / "beside").write_text("beside")


LAYERS = (Layer("conformance-top", "1", _top), Layer("conformance", "1", _bottom))
"""The topmost first. Their content never changes, so they are built once."""

_LOOK = "~/link; cat ~/shared ~/.hidden* ~/deep/er/file ~/deep/beside; echo; stat -c %a ~/bin/tool; readlink ~/link"
_WHOLE = "tool\ntophiddendeepbeside\n700\nbin/tool\n"


@family.check("home starts as its layers, the topmost over the others, with modes and links as they were built")
async def home(subject: BoxSubject) -> None:
    async with subject.open(LAYERS) as box:
        same((await sh(box, _LOOK)).stdout.text, _WHOLE, "home")
        same((await sh(box, "ls -A ~")).stdout.text, ".hidden é\nbin\ndeep\nlink\nshared\n", "home holds")


@family.check("a box may change, delete and replace what a layer brought; the next box has it as it was")
async def changes(subject: BoxSubject) -> None:
    change = "echo x > ~/shared; rm -r ~/bin; mkdir ~/bin; ls -A ~/bin; rm ~/link; chmod 700 ~/deep; "
    change += "mv ~/deep/er ~/moved; cat ~/moved/file"
    for _ in range(2):
        async with subject.open(LAYERS) as box:
            same((await sh(box, _LOOK)).stdout.text, _WHOLE, "home")
            ran = await sh(box, change)
            same((ran.code, ran.stdout.text, ran.stderr.text), (0, "deep", ""), "changing it said")


@family.check("two boxes at once change the same layers, each for itself")
async def side_by_side(subject: BoxSubject) -> None:
    async with subject.open(LAYERS) as first, subject.open(LAYERS) as second:
        await sh(first, "echo first > ~/shared; rm -r ~/deep")
        same((await sh(second, _LOOK)).stdout.text, _WHOLE, "the other box's home")
        await sh(second, "echo second > ~/shared")
        same((await sh(first, "cat ~/shared")).stdout.text, "first\n", "its own home")
