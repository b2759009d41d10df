"""From MCP's tool format to OpenAI's, and which of several tools with one name is offered. Pure."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollcage.json_safe import json_safe
from rollcage.mcp.errors import ToolConflict
from rollcage.mcp.types import RESERVED, NameConflict, OnConflict, Tool
from rollcage.types import JsonObject

LONGEST = 64
"""OpenAI takes names of up to 64 letters, digits, `_` and `-`."""

_FOREIGN = re.compile(r"[^a-zA-Z0-9_-]")


def convert_tool_format(tool: Mapping[str, Any] | Any, name: str = "") -> JsonObject:
    """An MCP tool (a dict, or an object of any `mcp` version) in OpenAI's format; nothing of the schema is lost."""
    raw = raw_tool(tool)
    schema = raw.get("inputSchema")
    parameters = copy.deepcopy(schema) if isinstance(schema, dict) else {}
    # The two keys OpenAI insists on; everything else stays as it is, $defs, anyOf, defaults and all.
    parameters.setdefault("type", "object")
    parameters.setdefault("properties", {})
    function: JsonObject = {"name": name or offered_name(str(raw.get("name", ""))), "parameters": parameters}
    description = raw.get("description") or raw.get("title")
    if description:
        function["description"] = str(description)
    return {"type": "function", "function": function}


def raw_tool(tool: Mapping[str, Any] | Any) -> JsonObject:
    """The tool as it goes over the wire."""
    if isinstance(tool, Mapping):
        raw = dict(tool)
        if "inputSchema" not in raw and "input_schema" in raw:
            raw["inputSchema"] = raw.pop("input_schema")
        return raw
    dumped: JsonObject = tool.model_dump(by_alias=True, exclude_none=True, mode="json")
    return dumped


def offered_name(name: str, endpoint: str = "") -> str:
    """The name as OpenAI takes it; of an endpoint's own where one is given."""
    whole = _FOREIGN.sub("_", f"{endpoint}__{name}" if endpoint else name)
    if len(whole) <= LONGEST:
        return whole
    digest = hashlib.sha256(f"{endpoint}\0{name}".encode()).hexdigest()[:8]
    return f"{whole[: LONGEST - 9]}_{digest}"


class Union:
    """The tools of all endpoints, each under one name, by a rule that is recorded."""

    def __init__(self, on_conflict: OnConflict) -> None:
        self._rule = on_conflict
        self.tools: dict[str, Tool] = {}
        self.withheld: list[str] = []
        self._conflicts: dict[str, NameConflict] = {}

    @property
    def conflicts(self) -> list[NameConflict]:
        """Names that more than one endpoint has."""
        return list(self._conflicts.values())

    def add(self, endpoint: str, tools: Sequence[JsonObject]) -> None:
        """The tools of the next endpoint, in order of precedence."""
        for given in tools:
            # Nobody vouches for what an endpoint says: what is nested too deep, or no text, could not be passed on.
            raw: JsonObject = json_safe(given)
            original = raw.get("name")
            if not isinstance(original, str) or not original:
                self.withheld.append(f"{endpoint}: a tool without a name")
                continue
            plain = offered_name(original)
            if plain in RESERVED:
                self.withheld.append(f"{endpoint}: {original}")
            elif plain not in self.tools:
                self._offer(plain, endpoint, raw)
            else:
                self._shared(plain, endpoint, raw)

    def find(self, name: str) -> Tool | None:
        """The tool to be called by this name: the offered one, or its own where that is another."""
        found = self.tools.get(name) or self.tools.get(offered_name(name))
        # Another tool may have been offered under the name that this one would have had.
        return found if found and name in (found.name, found.original) else None

    def _offer(self, name: str, endpoint: str, raw: JsonObject) -> None:
        openai = convert_tool_format(raw, name)
        original = str(raw.get("name", ""))
        self.tools[name] = Tool(name=name, endpoint=endpoint, original=original, raw=raw, openai=openai)

    def _shared(self, plain: str, endpoint: str, raw: JsonObject) -> None:
        winner = self.tools[plain].endpoint
        if self._rule == "error":
            raise ToolConflict(
                f"both {winner!r} and {endpoint!r} have a tool {plain!r}: choose on_conflict first or prefix, "
                "or name only one of the endpoints",
                endpoint=endpoint,
            )
        name = offered_name(str(raw.get("name", "")), endpoint) if self._rule == "prefix" else None
        if name is not None and name not in self.tools:
            self._offer(name, endpoint, raw)
        known = self._conflicts.get(plain)
        others = {**(known.others if known else {}), endpoint: name}
        self._conflicts[plain] = NameConflict(name=plain, winner=winner, others=others)
