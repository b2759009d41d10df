"""An agent that is a shell script: bash runs the instruction. For trying out solutions, and for hostile tests."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from anyio.abc import ByteReceiveStream

from rollcage.agents.base import AgentExit, Offer, Say
from rollcage.errors import UsageError
from rollcage.events import AgentSaid, AgentStarted
from rollcage.layers import Layer
from rollcage.sandboxes.base import Sandbox, tail
from rollcage.types import AgentSpec

_LIMIT = 64 << 10


class Shell:
    """The agent `shell`: no layers, no model calls of its own; what it is lent is in its environment."""

    name = "shell"
    version = "1"
    own_paths: Sequence[str] = ()

    def check(self, spec: AgentSpec) -> None:
        """It has no prompt, tools or configuration that could be set."""
        if spec.system_prompt or spec.config or spec.disabled_tools or spec.enabled_tools is not None:
            raise UsageError("agent: shell takes only `env`; it has no system prompt, tools or configuration")

    def layers(self) -> Sequence[Layer]:
        """None."""
        return ()

    async def solve(
        self, box: Sandbox, instruction: str, offer: Offer, spec: AgentSpec, *, workdir: str, say: Say
    ) -> AgentExit:
        """Run the instruction as a bash script in the workdir; what it printed goes into the log at its end."""
        await say(AgentStarted(agent=self.name, version=self.version))
        environment = {
            "OPENAI_BASE_URL": offer.model.base_url,
            "OPENAI_API_KEY": offer.model.key.get_secret_value(),
            "OPENAI_MODEL": offer.model.model,
            **({"TOOLS_URL": offer.tools_url} if offer.tools_url else {}),
        }

        async def hear(name: str, stream: ByteReceiveStream) -> None:
            output = await tail(stream, _LIMIT)
            if output.data:
                await say(AgentSaid(data={"type": name, "text": output.text}))

        async with box.spawn(["bash", "-c", instruction], env=environment | spec.env, cwd=workdir) as process:
            await process.stdin.aclose()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hear, "stdout", process.stdout)
                tasks.start_soon(hear, "stderr", process.stderr)
            code = await process.wait()
        return AgentExit(code=code, error=None)

    async def log_tail(self, box: Sandbox) -> str:
        """It keeps no log."""
        return ""
