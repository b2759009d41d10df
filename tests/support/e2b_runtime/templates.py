"""Templates of the small E2B: what a build was told to do is done again in every box that is made of it."""

from __future__ import annotations

import io
import json
import secrets
import tarfile
from collections.abc import Sequence

from rollcage.errors import SandboxError
from rollcage.sandboxes.base import Sandbox, sh
from rollcage.types import JsonObject


class Templates:
    """Those that were built through the API."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._steps: dict[str, Sequence[JsonObject]] = {}
        self._files: dict[str, bytes] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What can be ordered."""
        return tuple(name for name, template_id in self._names.items() if template_id in self._steps)

    def steps(self, name: str) -> Sequence[JsonObject] | None:
        """How it is made; None where there is none of that name."""
        return self._steps.get(self._names.get(name, name))

    def upload(self, name: str, data: bytes) -> None:
        """Files of a build arrive."""
        self._files[name] = data

    def answer(self, method: str, parts: Sequence[str], body: bytes, base: str) -> tuple[int, JsonObject]:
        """One request to the template API."""
        match method, list(parts):
            case "POST", ["v3", "templates"]:
                name, template_id = json.loads(body)["name"], secrets.token_hex(10)
                self._names[name] = template_id
                told = {"templateID": template_id, "buildID": secrets.token_hex(16), "names": [name], "tags": []}
                return 202, {**told, "public": False, "aliases": [name]}
            case "GET", ["templates", _, "files", name]:
                return 201, {"present": name in self._files, "url": f"{base}/uploads/{name}"}
            case "POST", ["v2", "templates", template_id, "builds", _]:
                self._steps[template_id] = json.loads(body).get("steps", [])
                return 202, {}
            case "GET", ["templates", template_id, "builds", build_id, "status"]:
                told = {"templateID": template_id, "buildID": build_id, "status": "ready", "logs": []}
                return 200, {**told, "logEntries": []}
        return 404, {"code": 404, "message": "not in this small E2B"}

    async def apply(self, box: Sandbox, steps: Sequence[JsonObject]) -> None:
        """Make a new box what its template says."""
        for step in steps:
            arguments = step.get("args", [])
            if step["type"] == "COPY":
                await self._copy(box, step["filesHash"], arguments[1])
            elif step["type"] == "RUN" and arguments[1:] != ["root"]:
                # What root is to do needs a network and a system of one's own; local boxes have neither.
                ran = await sh(box, arguments[0], timeout_s=300)
                if ran.code:
                    raise SandboxError(f"template: {arguments[0]!r} ended with {ran.code}: {ran.stderr.text[-300:]}")

    async def _copy(self, box: Sandbox, name: str, target: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(self._files[name])) as archive:
            for member in archive:
                stream = archive.extractfile(member)
                if stream is not None:
                    place = f"{target}{member.name}" if target.endswith("/") else target
                    await box.write(place, stream.read())
