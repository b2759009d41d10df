"""An agent that knows the answer: it does what the task's reference solution says, and asks no model.

A solution is a patch, a script, or the turns of the scripted model: of those it runs the commands and makes the edits
that the turns ask for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import PurePosixPath

from rollcage.agent_events import AgentOutput
from rollcage.agents.base import AgentContext, AgentExit, Emit
from rollcage.agents.nop import Nop
from rollcage.errors import FileMissing, UsageError
from rollcage.events import AgentEmitted, AgentStarted
from rollcage.sandboxes.base import SHELL, Exit, Sandbox, run, sh
from rollcage.sandboxes.files import unpack_archive
from rollcage.types import AgentSpec, JsonObject, Task

SPARE_S = 60.0
"""How much longer a step may take than the agent, whose own time ends it."""
_APPLY = """
if command -v git >/dev/null; then exec git apply --whitespace=nowarn -; fi
exec patch --strip=1 --forward --batch
"""


_TAIL = 8 << 10
Files = Callable[[str], AsyncGenerator[bytes, None]]


class Oracle(Nop):
    """The agent `oracle`: plays the reference solution of the task it is bound to."""

    name = "oracle"
    script_field = "solution_script"

    def __init__(self, task: Task | None = None, *, files: Files | None = None) -> None:
        """`task`: whose solution; `bound_to` gives it. `files`: an archive of files, by its digest."""
        self._task, self._files = task, files
        self.own_paths = (task.solution_dir,) if task and task.solution_tree else ()
        self._tail = ""

    def bound_to(self, task: Task) -> Oracle:
        """One that knows this task's solution."""
        if not has_solution(task):
            raise UsageError(
                "oracle plays the task's reference solution, and it has none",
                argument="agent",
                remedy="give the task `solution`, `solution_script` or `solution_patch`",
            )
        return Oracle(task, files=self._files)

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Apply the patch, run the script, or do what the scripted turns ask for, one after the other."""
        await emit(AgentStarted(agent=self.name, version=self.version))
        if self._task is None:
            raise UsageError("oracle is bound to no task")
        if self._task.solution_tree and self._files:
            async with aclosing(self._files(self._task.solution_tree.digest)) as chunks:
                await unpack_archive(box, self._task.solution_dir, chunks)
        for step in steps(self._task):
            ended = await step(box, workdir)
            said = ended.stdout.text + ended.stderr.text if ended else ""
            if said:
                self._tail = (self._tail + said)[-_TAIL:]
                await emit(AgentEmitted(event=AgentOutput(stream="stdout", text=said)))
            if ended and ended.code and (self._task.solution_patch or self._task.solution_script):
                lines = (ended.stderr.text.strip() or ended.stdout.text.strip()).splitlines()[-3:]
                return AgentExit(code=ended.code, error=f"the reference solution failed: {' / '.join(lines)}")
        return AgentExit(code=0, error=None)

    async def log_tail(self, box: Sandbox) -> str:
        """The end of what the solution printed."""
        return self._tail


Step = Callable[[Sandbox, str], Awaitable[Exit | None]]
"""Does one thing in the box, given the workdir; what it printed, where it was a command."""


def has_solution(task: Task) -> bool:
    """Whether the task brings a reference solution."""
    if task.steps:
        return all(has_solution(step.task) for step in task.steps)
    return bool(task.solution_patch or task.solution_script or any(turn.tool_calls for turn in task.solution))


def steps(task: Task) -> list[Step]:
    """What the task's solution does, in order; a script takes the place of the scripted turns."""
    found: list[Step] = []
    seconds = task.limits.agent_timeout_s + SPARE_S
    if task.solution_patch:
        found.append(_patching(task.solution_patch, seconds))
    if task.solution_script:
        return [*found, _command(task.solution_script, seconds)]
    if found:
        return found
    calls = [call for turn in task.solution for call in turn.tool_calls]
    return [step for call in calls if (step := _step(call.name, call.arguments, seconds))]


def _step(tool: str, arguments: JsonObject, seconds: float) -> Step | None:
    """What a tool call changes; None for one that only looks."""
    path = str(arguments.get("filePath", ""))
    if tool == "bash":
        return _command(str(arguments.get("command", "")), seconds)
    if tool == "write":
        return _writing(path, str(arguments.get("content", "")))
    if tool == "edit":
        return _editing(path, str(arguments.get("oldString", "")), str(arguments.get("newString", "")))
    return None


def _command(text: str, seconds: float) -> Step:
    async def step(box: Sandbox, workdir: str) -> Exit:
        return await sh(box, text, cwd=workdir, timeout_s=seconds)

    return step


def _patching(patch: str, seconds: float) -> Step:
    async def step(box: Sandbox, workdir: str) -> Exit:
        command = [*SHELL, _APPLY]
        return await run(box, command, stdin=patch.encode(), cwd=workdir, timeout_s=seconds)

    return step


def _writing(path: str, text: str) -> Step:
    async def step(box: Sandbox, workdir: str) -> None:
        await box.write(_place(path, workdir), text.encode())

    return step


def _editing(path: str, old: str, new: str) -> Step:
    async def step(box: Sandbox, workdir: str) -> None:
        place = _place(path, workdir)
        try:
            text = (await box.read(place, limit=16 << 20)).decode()
        except FileMissing:
            text = ""
        await box.write(place, text.replace(old, new, 1).encode() if old else new.encode())

    return step


def _place(path: str, workdir: str) -> str:
    return str(PurePosixPath(workdir, path))
