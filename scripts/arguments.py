"""Writes src/rollcage/schema/arguments.py: the arguments of a rollout for type checkers, made from RolloutRequest.

Run it after changing RolloutRequest: `python scripts/arguments.py`. A test compares the file with what this makes.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr

from rollcage.schema import request

TARGET = Path(request.__file__).with_name("arguments.py")
HEAD = '''"""The arguments of a rollout for type checkers. Made by scripts/arguments.py, from `RolloutRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class RolloutArguments(TypedDict, total=False):
    """The arguments of a rollout beside `instruction`; None is the same as not given."""

'''


def spelled(kind: Any) -> str:
    """A type as a caller writes values of it."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " | ".join(spelled(part) for part in parts if part is not NoneType)
    if origin is Literal:
        choices = ", ".join('"' + str(part) + '"' for part in parts)
        return f"Literal[{choices}]"
    if origin is tuple:
        return f"Sequence[{spelled(parts[0])}]"
    if origin is dict:
        return f"Mapping[{', '.join(spelled(part) for part in parts)}]"
    if kind is Any:
        return "Any"
    if kind in (str, int, float, bool):
        return str(kind.__name__)
    return "str" if kind is SecretStr else "Mapping[str, Any]"


def arguments() -> str:
    """The text of the module."""
    fields = request.RolloutRequest.model_fields
    lines = (f"    {name}: {spelled(field.annotation)} | None\n" for name, field in fields.items())
    return HEAD + "".join(line for line in lines if not line.startswith("    instruction:"))


if __name__ == "__main__":
    TARGET.write_text(arguments())
