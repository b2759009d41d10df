"""What stands by plain verifiers, which do not know the launcher: no change to what honest ones see.

Scripts of the agent's that they start by `python3` or `node` are launched as the judged; test runners import Python's
own modules; code under test that ends their process has failed. Code in the verifier's own process can get around that:
the reward's trust is `shared` all the same.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Collection
from importlib import resources

from rollcage.sandboxes.judged import TOOLS
from rollcage.types import Task

_SHIMMED = ("python3", "python", "node")
_MOST_SCRIPTS = 2000
_SCRIPTS = re.compile(r"(\.(py|js|cjs|mjs)|(^|/)[^./\n]+)$")


def guards(task: Task, changed: Collection[str] | None, *, launches: bool) -> dict[str, str]:
    """Files that are put beside the launcher, by name. `changed`: what the agent made or changed in the workdir; None
    where that is not known. `launches`: the verifier knows the launcher, and says itself what is launched."""
    if not task.guards or task.isolate or task.checks or not (task.verify or task.test_script):
        return {}
    work = task.work_paths
    site = _text("judge_site.py").replace("WORK: tuple[str, ...] = ()", f"WORK: tuple[str, ...] = {work!r}")
    node = _text("judge_node.cjs").replace("WORK = []", f"WORK = {json.dumps(work)}")
    if changed is not None:
        modules = sorted({path.partition("/")[0].removesuffix(".py") for path in changed} & sys.stdlib_module_names)
        site = site.replace("LEFT: frozenset[str] | None = None", f"LEFT = frozenset({modules!r})")
    found = {"sitecustomize.py": site, "judge_node.cjs": node}
    scripts = sorted(f"{task.workdir}/{path}" for path in changed or () if _SCRIPTS.search(path))
    if launches or not _apart(task) or len(scripts) > _MOST_SCRIPTS:
        scripts = []
    shim = _text("shim.sh").replace("@TOOLS@", TOOLS)
    shim = shim.replace("@WORK@", shlex.quote(task.workdir)).replace("@TESTS@", shlex.quote(task.tests_dir))
    return {**found, "changed": "".join(f"{path}\n" for path in scripts), **dict.fromkeys(_SHIMMED, shim)}


def _apart(task: Task) -> bool:
    """Whether scripts can be launched: where the agent is asked for files in /tmp, they share it with the verifier."""
    return task.paths == "home" and not re.search(r"/tmp\b", task.instruction)  # noqa: S108


def _text(name: str) -> str:
    return (resources.files("rollcage.rollout") / "inside" / name).read_text("utf-8")
