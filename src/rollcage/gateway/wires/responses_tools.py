"""The tools of a Responses request: what chat completions can offer of them, and whose call a call is."""

from __future__ import annotations

from typing import NamedTuple

from rollcage.gateway.message import object_in
from rollcage.gateway.wires.base import BadRequest, dict_or_empty, dicts_in, text_at
from rollcage.types import JsonObject

INPUT = "input"
"""The one argument of a function that stands for a free-form tool."""


MORE_TOOLS = "additional_tools"
"""The type of an input item that offers tools."""


class AgentTool(NamedTuple):
    """A tool as the agent knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """Takes free text instead of JSON arguments."""


class Toolbox:
    """The tools an agent offers, under the names the model knows them by."""

    def __init__(self, body: JsonObject) -> None:
        """Of a whole request: Codex offers some models their tools in the conversation. Raises BadRequest."""
        self.offered: list[JsonObject] = []
        """As chat completions takes them."""
        self.left_out: list[str] = []
        """Kinds of tools that only the provider's own servers could run."""
        self._tools: dict[str, AgentTool] = {}
        for n, tool in enumerate(dicts_in(body.get("tools"), "tools")):
            self._add(tool, None, f"tools.{n}")
        items = body.get("input")
        for n, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict) and item.get("type") == MORE_TOOLS:
                where = f"input.{n}.tools"
                for m, tool in enumerate(dicts_in(item.get("tools"), where)):
                    self._add(tool, None, f"{where}.{m}")

    def tool(self, called: str) -> AgentTool:
        """The agent's tool for a name that the model called."""
        return self._tools.get(called) or AgentTool(called)

    def called(self, name: str, namespace: str | None) -> str:
        """The name by which the model calls an agent's tool."""
        for called, tool in self._tools.items():
            if (tool.name, tool.namespace) == (name, namespace):
                return called
        return name

    def chosen(self, choice: object) -> JsonObject:
        """`tool_choice` and the tools that go with it. Raises BadRequest."""
        if not self.offered:
            return {}
        tools = {"tools": self.offered}
        if choice is None or isinstance(choice, str):
            return tools | ({"tool_choice": choice} if choice else {})
        wanted = dict_or_empty(choice)
        kind = wanted.get("type")
        if kind in ("function", "custom"):
            name = self.called(text_at(wanted, "name", "tool_choice"), wanted.get("namespace"))
            return tools | {"tool_choice": {"type": "function", "function": {"name": name}}}
        if kind == "allowed_tools":
            allowed = dicts_in(wanted.get("tools"), "tool_choice.tools")
            names = {self.called(str(each.get("name")), each.get("namespace")) for each in allowed}
            offered = [tool for tool in self.offered if tool["function"]["name"] in names]
            return {"tools": offered, "tool_choice": wanted.get("mode", "auto")} if offered else {}
        raise BadRequest(f"tool_choice: this model has no tool of the type {kind}", "tool_choice")

    def _add(self, tool: JsonObject, namespace: str | None, where: str) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            inner = dicts_in(tool.get("tools"), f"{where}.tools")
            for n, each in enumerate(inner):
                self._add(each, text_at(tool, "name", where), f"{where}.tools.{n}")
        elif kind == "function":
            name = self._name(text_at(tool, "name", where), namespace, custom=False)
            schema = tool.get("parameters")
            self._offer(name, tool.get("description"), schema if isinstance(schema, dict) else _NOTHING, tool)
        elif kind == "custom":
            name = self._name(text_at(tool, "name", where), namespace, custom=True)
            self._offer(name, _explained(tool), _FREE_TEXT, {})
        else:
            self.left_out.append(str(kind))

    def _name(self, name: str, namespace: str | None, *, custom: bool) -> str:
        """Chat has no namespaces: the plain name where it is free, else one that tells them apart."""
        called = name
        if called in self._tools and namespace:
            called = f"{namespace}__{name}"[-64:]
        self._tools[called] = AgentTool(name, namespace, custom)
        return called

    def _offer(self, name: str, description: object, parameters: JsonObject, tool: JsonObject) -> None:
        function: JsonObject = {"name": name}
        if isinstance(description, str) and description:
            function["description"] = description
        function["parameters"] = parameters
        if isinstance(tool.get("strict"), bool):
            function["strict"] = tool["strict"]
        self.offered.append({"type": "function", "function": function})


def free_text(arguments: str) -> str:
    """What a model means a free-form tool to get: the one argument, or all it wrote if it kept to no form."""
    value = (object_in(arguments) or {}).get(INPUT)
    return value if isinstance(value, str) else arguments


_NOTHING: JsonObject = {"type": "object", "properties": {}}
_FREE_TEXT: JsonObject = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": [INPUT],
    "additionalProperties": False,
}


def _explained(tool: JsonObject) -> str:
    """The description, with the grammar that an engine of OpenAI's would have enforced."""
    description, form = str(tool.get("description") or ""), dict_or_empty(tool.get("format"))
    if form.get("type") != "grammar":
        return description
    rule = f"The input must match this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"
    return f"{description}\n\n{rule}" if description else rule
