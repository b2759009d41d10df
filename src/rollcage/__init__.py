"""rollcage runs real coding agents in isolated boxes and brings back training-grade rollouts.

`rollcage.run("Fix the tests.", verify=["pytest -q"], endpoint="vllm").reward`: see docs/python.md.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take this name for true; importing `typing` would take longer than all the rest
if TYPE_CHECKING:
    # What type checkers see; at run time each name is fetched when it is first used.
    from rollcage import tasks as tasks
    from rollcage.api.evaluate import Batch as Batch
    from rollcage.api.run import aeval as aeval
    from rollcage.api.run import arun as arun
    from rollcage.api.run import arun_group as arun_group
    from rollcage.api.run import eval as eval
    from rollcage.api.run import load as load
    from rollcage.api.run import open_runner as open_runner
    from rollcage.api.run import run as run
    from rollcage.api.run import run_group as run_group
    from rollcage.client import Client as Client
    from rollcage.client import SyncClient as SyncClient
    from rollcage.cluster import Cluster as Cluster
    from rollcage.errors import RollcageError as RollcageError
    from rollcage.errors import SetupError as SetupError
    from rollcage.errors import StoreError as StoreError
    from rollcage.errors import UsageError as UsageError
    from rollcage.results.fold import Rollout as Rollout
    from rollcage.runner import Runner as Runner
    from rollcage.settings import Settings as Settings
    from rollcage.store import Store as Store
    from rollcage.tasks import TaskFile as TaskFile
    from rollcage.trajectory import Sequence as Sequence
    from rollcage.trajectory import sequences as sequences
    from rollcage.types import Endpoint as Endpoint
    from rollcage.types import Job as Job
    from rollcage.types import Limits as Limits
    from rollcage.types import Outcome as Outcome
    from rollcage.types import Reward as Reward
    from rollcage.types import Task as Task
    from rollcage.types import Token as Token
    from rollcage.types import Turn as Turn

    __version__: str

_MODULES = {
    "api.evaluate": "Batch",
    "api.run": "aeval arun arun_group eval load open_runner run run_group",
    "client": "Client SyncClient",
    "cluster": "Cluster",
    "errors": "RollcageError SetupError StoreError UsageError",
    "results.fold": "Rollout",
    "runner": "Runner",
    "settings": "Settings",
    "store": "Store",
    "tasks": "TaskFile",
    "trajectory": "Sequence sequences",
    "types": "Endpoint Job Limits Outcome Reward Task Token Turn",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

_ROOMS = frozenset({"tasks"})
"""Modules of which programs use more than a name or two: `rollcage.tasks.load`."""

__all__ = [*sorted(_HOMES), *_ROOMS, "__version__"]

if not TYPE_CHECKING:  # with it, a type checker would believe in every name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("rollcage")
        if name not in _HOMES and name not in _ROOMS:
            raise AttributeError(f"module 'rollcage' has no attribute {name!r}")
        from importlib import import_module

        if name in _ROOMS:
            return import_module(f"rollcage.{name}")
        value = globals()[name] = getattr(import_module(f"rollcage.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return list(__all__)
