"""The instance manager of the local Fleet: the HTTP plane of one instance, as the SDK speaks to it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollcage.simulators.fleet.desk import Desk
from rollcage.simulators.fleet.faults import Faults

VERIFIER_S = 30.0
"""The time of a verifier."""

_CHILD = """
import inspect, json, sys
from fleet.verifiers.db import DatabaseSnapshot
asked = json.load(sys.stdin)
names = {"DatabaseSnapshot": DatabaseSnapshot, "TASK_SUCCESSFUL_SCORE": 1, "TASK_FAILED_SCORE": 0}
exec(asked["code"], names)
verify, given = names[asked["name"]], [DatabaseSnapshot(asked["seed"]), DatabaseSnapshot(asked["current"])]
try:
    inspect.signature(verify).bind(*given, asked["answer"])
    given.append(asked["answer"])
except TypeError:
    pass
result = verify(*given)
print(json.dumps({"result": result}))
"""


class Manager:
    """Reset, resources, queries, verifiers of one desk; step and state where they are switched on."""

    def __init__(self, env_key: str, desk: Desk, faults: Faults) -> None:
        self._env_key, self._desk, self._faults = env_key, desk, faults
        self._steps = self._episodes = 0
        self.resets: list[int | None] = []
        """The seeds it was reset with."""

    def app(self) -> Starlette:
        """Its routes."""
        base = "/api/v1/env"
        return Starlette(
            routes=[
                Route(f"{base}/health", self._health),
                Route(f"{base}/reset", self._reset, methods=["POST"]),
                Route(f"{base}/step", self._step, methods=["POST"]),
                Route(f"{base}/state", self._state),
                Route(f"{base}/resources", self._resources),
                Route(f"{base}/resources/sqlite/{{name}}/describe", self._describe),
                Route(f"{base}/resources/sqlite/{{name}}/query", self._query, methods=["POST"]),
                Route(f"{base}/execute_verifier_function", self._verify, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "healthy", "timestamp": "2026-01-01T00:00:00Z", "service": self._env_key})

    async def _reset(self, request: Request) -> JSONResponse:
        raw = await request.body()
        asked = (json.loads(raw) if raw else None) or {}
        if self._env_key in self._faults.reset_broken:
            return JSONResponse({"detail": "reset failed"}, status_code=self._faults.reset_broken[self._env_key])
        if self._env_key in self._faults.reset_refused:
            return JSONResponse({"success": False, "message": self._faults.reset_refused[self._env_key]})
        seed = asked.get("seed")
        self._desk.reset(seed or 0)
        self._steps, self._episodes = 0, self._episodes + 1
        self.resets.append(seed)
        return JSONResponse({"success": True, "message": "Environment reset"})

    async def _step(self, request: Request) -> JSONResponse:
        if not self._faults.offers_step:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        asked = await request.json()
        self._steps += 1
        shown = {
            "echo": asked.get("action"),
            "open": len(self._desk.rows("SELECT 1 FROM tickets WHERE status = 'open'")),
        }
        return JSONResponse({"observation": shown, "reward": 0.0, "done": False})

    async def _state(self, request: Request) -> JSONResponse:
        if not self._faults.offers_step:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        usual = {"episode_id": f"episode-{self._episodes}", "step_count": self._steps, "desk": "open"}
        return JSONResponse({**usual, **self._faults.state})

    async def _resources(self, request: Request) -> JSONResponse:
        modes = {"current": "rw", "seed": "ro"}
        return JSONResponse(
            [{"name": name, "type": "sqlite", "mode": mode, "label": None} for name, mode in modes.items()]
        )

    async def _describe(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if name not in self._desk.paths:
            return JSONResponse({"detail": f"no database {name}"}, status_code=404)
        with self._desk.opened(name, read_only=True) as database:
            found = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
            tables = [_table(database, row["name"], row["sql"]) for row in found]
        said = {"success": True, "resource_name": name, "tables": tables, "error": None, "message": "ok"}
        return JSONResponse(said)

    async def _query(self, request: Request) -> JSONResponse:
        name, asked = request.path_params["name"], await request.json()
        if name not in self._desk.paths:
            return JSONResponse({"detail": f"no database {name}"}, status_code=404)
        try:
            with self._desk.opened(name, read_only=asked.get("read_only") is not False) as database, database:
                cursor = database.execute(asked["query"], asked.get("args") or [])
                rows = [list(row) for row in cursor.fetchall()]
                columns = [column[0] for column in cursor.description or ()]
                said: dict[str, Any] = {"columns": columns, "rows": rows, "rows_affected": cursor.rowcount}
                said |= {"success": True, "last_insert_id": cursor.lastrowid, "error": None, "message": "ok"}
        except sqlite3.Error as error:
            said = {"success": False, "error": str(error), "message": "the query failed"}
        return JSONResponse(said)

    async def _verify(self, request: Request) -> Response:
        """In a process of its own, with a time limit. It is no sandbox: whoever may ask already runs code here."""
        asked = await request.json()
        if self._faults.verifiers is not None and asked["function_code"] not in self._faults.verifiers:
            refused = "this Fleet runs none but its own verifiers"
            return JSONResponse({"success": False, "result": None, "error": refused, "message": refused})
        paths = {name: str(path) for name, path in self._desk.paths.items()}
        job = {
            "code": asked["function_code"],
            "name": asked["function_name"],
            "answer": asked.get("text_solution"),
            **paths,
        }
        result: Any = None
        error: str | None = None
        try:
            with anyio.fail_after(VERIFIER_S):
                command = [sys.executable, "-I", "-c", _CHILD]
                done = await anyio.run_process(command, input=json.dumps(job).encode(), check=True)
            result = json.loads(done.stdout.splitlines()[-1])["result"]
        except subprocess.CalledProcessError as failure:
            error = failure.stderr.decode(errors="replace").strip().splitlines()[-1:][0] if failure.stderr else "died"
        except TimeoutError:
            error = f"the verifier took longer than {VERIFIER_S:g} s"
        except (ValueError, IndexError):
            error = "the verifier's result is no JSON"
        answer = {"success": error is None, "result": result, "error": error, "message": error or "ok"}
        # Whatever the verifier gave, NaN included: judging it is the client's business.
        return Response(json.dumps(answer), media_type="application/json")


def _table(database: sqlite3.Connection, name: str, sql: str) -> dict[str, Any]:
    columns = [
        {"name": row["name"], "type": row["type"], "notnull": bool(row["notnull"]), "default_value": row["dflt_value"]}
        | {"primary_key": bool(row["pk"])}
        for row in database.execute(f"PRAGMA table_info({name})")
    ]
    return {"name": name, "sql": sql, "columns": columns}
