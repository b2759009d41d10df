"""`rollcage serve --warm`: boxes with the agent's server in them, before anybody asks for a rollout."""

from __future__ import annotations

from pathlib import Path

import anyio

from support.commands import rollcage
from support.served import served


def agents_of(parent: int) -> list[int]:
    """Processes below this one that are an agent's server, wherever its box hides them."""
    parents: dict[int, int] = {}
    serving = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if command[0].endswith(b"/opencode") and b"serve" in command:
            serving.append(int(folder.name))
    found = []
    for number in serving:
        above = number
        while above in parents and above != parent:
            above = parents[above]
        if above == parent:
            found.append(number)
    return found


async def test_agents_wait_before_a_rollout_is_asked_for_and_end_with_the_server(
    tmp_path: Path, state_dir: Path
) -> None:
    for name in ("layers", "cache", "downloads"):
        (tmp_path / name).symlink_to(state_dir / name)
    async with served(tmp_path, "--warm", "1") as server:
        with anyio.fail_after(120):
            while not (waiting := agents_of(server.process.pid)):
                await anyio.sleep(0.05)
        async with server.client() as client:
            assert (await client.page()).rollouts == [], "nobody asked for anything"
    with anyio.fail_after(120):
        while [number for number in waiting if Path(f"/proc/{number}").exists()]:
            await anyio.sleep(0.05)


def test_a_number_of_boxes_that_cannot_be_is_refused(tmp_path: Path) -> None:
    ended = rollcage(tmp_path, "serve", "--warm", "-1")
    assert ended.returncode == 2 and "--warm" in ended.stderr
