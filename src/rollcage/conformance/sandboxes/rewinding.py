"""Rewind, for backends that offer it: home goes back to its checkpoint, except for what is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollcage.conformance.sandboxes import host
from rollcage.conformance.sandboxes.layering import LAYERS
from rollcage.conformance.sandboxes.values import BoxSubject, Failed, Family, NotApplicable, expect, same
from rollcage.errors import SandboxError
from rollcage.sandboxes.base import Rewindable, Sandbox, sh
from rollcage.sandboxes.layers import Layer
from rollcage.types import HOME

family = Family("rewind", excusable=True)

_WORK = f"{HOME}/workdir"
_TREE = "cd ~; find . -mindepth 1 \\( -type f -printf '%P %s %m\\n' -o -printf '%P %y %l %m\\n' \\) | sort"
_SETUP = (
    f"mkdir -p {_WORK}/src ~/d; echo one > {_WORK}/src/a; echo two > {_WORK}/b; echo rc > ~/.bashrc; echo x > ~/d/x"
)


class _Box(Sandbox, Rewindable):
    """Both at once, for the type checker."""


@asynccontextmanager
async def _opened(subject: BoxSubject, layers: Sequence[Layer] = ()) -> AsyncIterator[_Box]:
    async with subject.open(layers) as box:
        if not isinstance(box, Rewindable):
            raise NotApplicable("boxes of this backend do not rewind; rollouts verify in a fresh one")
        yield box  # type: ignore[misc]


async def _tree(box: Sandbox) -> list[str]:
    return (await sh(box, _TREE, limit=1 << 20)).stdout.text.splitlines()


@family.check("only the kept paths stay as they were left; all else in home is back, and what had changed is named")
async def keeps(subject: BoxSubject) -> None:
    async with _opened(subject, LAYERS) as box:
        await sh(box, _SETUP)
        before = await _tree(box)
        await box.checkpoint()
        same(await _tree(box), before, "home after the checkpoint")
        await sh(
            box,
            f"cd {_WORK}; echo changed > src/a; rm b; echo n > new; rm -rf ~/d; mkdir -p ~/.config/evil; "
            "echo alias > ~/.bashrc; echo evil > ~/shared; rm -r ~/bin; mkdir ~/bin; echo evil > ~/bin/tool; "
            "echo t > /tmp/t",
        )
        changed = set(await box.rewind([_WORK]))
        for name in (".bashrc", ".config", "d", "shared", "bin"):
            expect(any(path.startswith(f"{HOME}/{name}") for path in changed), f"~/{name} was changed and is not named")
        expect(not any(path.startswith(_WORK) for path in changed), "a kept path is named as changed")
        rest = [line for line in await _tree(box) if not line.startswith("workdir")]
        same(rest, [line for line in before if not line.startswith("workdir")], "home outside the kept path")
        same(
            (await sh(box, f"cd {_WORK}; cat src/a new; ls; ls -A /tmp")).stdout.text,
            "changed\nn\nnew\nsrc\n",
            "the rest",
        )


@family.check("an untouched home names nothing, and a box can be rewound again and again")
async def again(subject: BoxSubject) -> None:
    async with _opened(subject) as box:
        await sh(box, _SETUP)
        before = await _tree(box)
        await box.checkpoint()
        same(await box.rewind([_WORK]), (), "what had changed")
        for _ in range(3):
            await sh(box, "rm -rf ~/* ~/.b*; echo mine > ~/mine; echo t > /tmp/t")
            expect(await box.rewind([]), "everything was deleted and nothing is named")
            same(await _tree(box), before, "home")


@family.check("a kept path that became a link, or lies behind one, leads nowhere")
async def links(subject: BoxSubject) -> None:
    with host.a_secret() as secret:
        async with _opened(subject) as box:
            await sh(box, "mkdir -p ~/a/b ~/c; echo 1 > ~/a/b/f")
            await box.checkpoint()
            await sh(box, f"rm -rf ~/a ~/c; ln -s {secret.parent} ~/a; ln -s /etc ~/c")
            changed = await box.rewind([f"{HOME}/a/b", f"{HOME}/c"])
            expect(f"{HOME}/c" in changed, f"a kept path that became a link is not named: {changed}")
            same((await sh(box, "ls ~/c/passwd ~/a/secret")).stdout.text, "", "behind the links there is")
        same([path.name for path in secret.parent.iterdir()], [secret.name], "the folder on the host has")


@family.check("without a checkpoint, with a path outside home, or while a command runs, it is a clear error")
async def refusals(subject: BoxSubject) -> None:
    async with _opened(subject) as box:

        async def refused(what: str, keep: Sequence[str] | None) -> None:
            try:
                await (box.checkpoint() if keep is None else box.rewind(keep))
            except SandboxError as error:
                expect(str(error), "the error says nothing")
            else:
                raise Failed(f"{what} is no error")

        await refused("a rewind without a checkpoint", [])
        await box.checkpoint()
        for path in ("/etc", f"{HOME}/../x", "workdir"):
            await refused(f"keeping {path}", [path])
        async with box.spawn(["sleep", "1000"]):
            await refused("a checkpoint while a command runs", None)
            await refused("a rewind while a command runs", [])
        same(await box.rewind([]), (), "what had changed")
