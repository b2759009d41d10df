"""Every agent by name: those that come with rollcage, those that are installed, and a user's own file.

A name is `codex`, `codex@0.169.0` (another version, of which no hash is known), what a package offers as an entry point
of the group `rollcage.agents`, or `path/to/agent.py:MyAgent`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rollcage.agents.base import Agent, Versioned, one_version
from rollcage.agents.cli_agent import CliAgent, Downloads
from rollcage.errors import UsageError

GROUP = "rollcage.agents"
"""Entry points of this group are agents: classes that are made with `Downloads`."""

Say = Callable[[str], None]


def shipped(downloads: Downloads) -> list[Agent]:
    """The coding agents that come with rollcage and are fetched when they are used."""
    from rollcage.agents.claude_code import ClaudeCode
    from rollcage.agents.codex import Codex
    from rollcage.agents.mini_swe_agent import MiniSweAgent
    from rollcage.agents.opencode.agent import OpenCode
    from rollcage.agents.pi import Pi
    from rollcage.agents.qwen_code import QwenCode

    return [kind(downloads) for kind in (OpenCode, ClaudeCode, Codex, Pi, QwenCode, MiniSweAgent)]


class AgentCatalog(Mapping[str, Agent]):
    """Agents by name. What is named by a file or a version is loaded when it is asked for, once."""

    def __init__(
        self, known: Sequence[Agent], downloads: Downloads, *, local: bool = True, say: Say = lambda line: None
    ) -> None:
        """`local`: files and other versions may be named, by somebody who could run them anyway."""
        self._known = {agent.name: agent for agent in known}
        self._downloads, self._local, self._say = downloads, local, say
        self._offered: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=GROUP)}

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._known, *self._offered])

    def __len__(self) -> int:
        return len({*self._known, *self._offered})

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        plain = name.partition("@")[0]
        return name in self._known or plain in {*self._known, *self._offered} or ".py:" in name

    def __getitem__(self, name: str) -> Agent:
        if name not in self._known:
            if name not in self:
                raise KeyError(name)
            self._known[name] = self._load(name)
        return self._known[name]

    def _load(self, name: str) -> Agent:
        if name in self._offered:
            return _made(self._offered[name].load(), name, self._downloads)
        if not self._local:
            what = "an agent of a file" if ".py:" in name else "another version of an agent"
            raise UsageError(f"{name!r}: {what} cannot be named over the network", argument="agent")
        if ".py:" in name:
            return _from_file(name, self._downloads)
        plain, _, version = name.partition("@")
        agent = self[plain]
        if not isinstance(agent, Versioned):
            raise one_version(agent)
        other = agent.at_version(version)
        if isinstance(other, Versioned) and not other.pinned:
            self._say(f"{plain} {version}: no hash of this version is known, what the registry sends is taken")
        return other


def _from_file(name: str, downloads: Downloads) -> Agent:
    path, _, kind = name.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"there is no file {path}", argument="agent")
    spec = importlib.util.spec_from_file_location(f"rollcage_agent_{abs(hash(str(file.resolve())))}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file", argument="agent")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be loaded: {type(error).__name__}: {error}", argument="agent") from error
    made = getattr(module, kind, None)
    if not isinstance(made, type):
        raise UsageError(f"{path} has no class {kind!r}", argument="agent")
    return _made(made, name, downloads)


def _made(kind: Any, name: str, downloads: Downloads) -> Agent:
    try:
        agent: Agent = kind(downloads) if isinstance(kind, type) and issubclass(kind, CliAgent) else kind()
    except Exception as error:
        raise UsageError(f"{name} cannot be made: {type(error).__name__}: {error}", argument="agent") from error
    for part in ("name", "version", "check", "layers", "solve", "log_tail", "own_paths"):
        if not hasattr(agent, part):
            raise UsageError(f"{name} is no agent: it has no {part}", argument="agent")
    return agent
