"""A server without OpenEnv, as `rollcage[server]` installs it: everything but OpenEnv's own addresses works."""

from __future__ import annotations

from pathlib import Path

from support.commands import rollcage
from support.served import served

HIDDEN = "import sys\nsys.modules['openenv'] = sys.modules['opencode_env'] = sys.modules['gradio'] = None\n"
"""Python then knows no package of that name."""


def without_openenv(folder: Path) -> dict[str, str]:
    """The environment of a process for which OpenEnv is not installed."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDDEN)
    return {"PYTHONPATH": str(folder)}


async def test_http_mcp_and_the_page_are_served_and_openenvs_addresses_say_what_is_missing(tmp_path: Path) -> None:
    environment = without_openenv(tmp_path / "hidden")
    async with served(tmp_path / "home", environment=environment) as server, server.http() as http:
        for path in ("/health", "/openapi.json", "/docs", "/web/", "/rollouts"):
            assert (await http.get(path)).status_code == 200, path
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        accepted = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}
        tools = (await http.post("/mcp", json=asked, headers=accepted)).json()["result"]["tools"]
        assert "run_rollout" in [tool["name"] for tool in tools]
        refused = await http.post("/reset", json={})
        assert (refused.status_code, refused.json()["error_code"]) == (404, "not_served")
        assert "rollcage[openenv]" in refused.json()["error"]
        assert "/reset" not in (await http.get("/openapi.json")).json()["paths"]
        assert "OpenEnv is not installed" in server.log.read_text()


def test_doctor_says_what_a_server_would_lack_and_is_content_without(tmp_path: Path) -> None:
    told = rollcage(tmp_path, "doctor", env=without_openenv(tmp_path / "hidden")).stdout
    assert "✓ server  serves HTTP and MCP, without OpenEnv's routes\n    pip install 'rollcage[openenv]'" in told
