"""Batches over HTTP, of a real server beside the command that runs them."""

from __future__ import annotations

from pathlib import Path

import anyio

from support.commands import rollcage
from support.served import served


async def test_a_batch_is_listed_looked_at_followed_and_compared(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('instruction = "touch a.txt"\nverify = ["test -e a.txt"]\n')
    arguments = ("eval", "good.toml", "-m", "scripted", "--agent", "shell", "-n", "2", "--name")
    async with served(tmp_path / "state") as server, server.http() as http:
        for name in ("one", "two"):
            ended = await anyio.to_thread.run_sync(rollcage, tmp_path, *arguments, name)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        listed = (await http.get("/batches")).json()["batches"]
        assert [(each["name"], each["status"]) for each in listed] == [("two", "done"), ("one", "done")]
        report = (await http.get("/batches/one")).json()
        assert report["overall"]["mean"] == 1.0 and report["tasks"][0]["rewards"] == [1.0, 1.0]
        rows = (await http.get("/batches/one/results")).json()
        assert rows["total"] == 2 and {row["sample"] for row in rows["rollouts"]} == {1, 2}
        cursor, kinds = 0, []
        while page := (await http.get("/batches/one/events", params={"after": cursor, "limit": 3})).json()["events"]:
            cursor = page[-1]["cursor"]
            kinds += [each["entry"]["event"]["kind"] for each in page]
        assert kinds.count("queued") == kinds.count("scored") == kinds.count("ended") == 2
        found = (await http.get("/batches/one/compare/two")).json()
        assert (found["tasks"], found["difference"]) == (1, 0.0)
        missing = await http.get("/batches/none")
        assert missing.status_code == 404 and missing.json()["error_code"] == "unknown_batch"
