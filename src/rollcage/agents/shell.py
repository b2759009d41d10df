"""An agent that is a shell script: bash runs the instruction. For trying out solutions, and for hostile tests."""

from __future__ import annotations

from typing import Literal

import anyio
from anyio.abc import ByteReceiveStream

from rollcage.agent_events import AgentOutput
from rollcage.agents.base import AgentContext, AgentExit, BareAgent, Emit
from rollcage.events import AgentEmitted, AgentStarted
from rollcage.sandboxes.base import Sandbox, tail
from rollcage.types import AgentSpec

_LIMIT = 64 << 10


class Shell(BareAgent):
    """The agent `shell`: no layers, no model calls of its own; what it is lent is in its environment."""

    name = "shell"
    asks_no_model = True
    script_field = "instruction"
    accepts = ("env",)

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Run the instruction as a bash script in the workdir; what it printed goes into the log at its end."""
        await emit(AgentStarted(agent=self.name, version=self.version))
        environment = {
            "OPENAI_BASE_URL": context.model.base_url,
            "OPENAI_API_KEY": context.model.key.get_secret_value(),
            "OPENAI_MODEL": context.model.model,
            **({"TOOLS_URL": context.tools_url} if context.tools_url else {}),
        }

        async def read(name: Literal["stdout", "stderr"], stream: ByteReceiveStream) -> None:
            output = await tail(stream, _LIMIT)
            if output.data:
                await emit(AgentEmitted(event=AgentOutput(stream=name, text=output.text)))

        async with box.spawn(["bash", "-c", instruction], env=environment | spec.env, cwd=workdir) as process:
            await process.stdin.aclose()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, "stdout", process.stdout)
                tasks.start_soon(read, "stderr", process.stderr)
            code = await process.wait()
        return AgentExit(code=code, error=None)
