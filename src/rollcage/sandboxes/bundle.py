"""Puts a program of several modules into one text, for boxes to which it is handed with `python3 -c`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

_HEAD = """import sys, types
def bundled(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    above, _, last = name.rpartition(".")
    setattr(sys.modules.setdefault(above, types.ModuleType(above)), last, module)
    exec(compile(source, name, "exec"), module.__dict__)
"""


def bundle(program: ModuleType, *used: ModuleType) -> str:
    """The text of `program`, which may import `used`, each by its full name and after those that it imports itself."""
    parts = [f"bundled({module.__name__!r}, {_source(module)!r})\n" for module in used]
    # Compiled by itself, and with the names that the text itself has: it is the program that is run.
    return f"{_HEAD}{''.join(parts)}exec(compile({_source(program)!r}, {program.__name__!r}, 'exec'), globals())\n"


def _source(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text()
