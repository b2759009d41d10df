"""Where things are in a box, by the published names."""

from __future__ import annotations

from rollcage.schema.request import RolloutRequest
from rollcage.types import HOME, LOGS_DIR, TESTS_DIR

WORKDIR = WORKDIR_PATH = f"{HOME}/workdir"
"""Where the agent starts."""
INSTRUCTION_PATH = f"{HOME}/task/instruction.md"
"""The instruction, in the boxes of the harness."""
REMOTE_TEST_PATH = f"{TESTS_DIR}/test.sh"
"""Where a test script is staged, after the agent is gone."""
REWARD_FILE = REMOTE_REWARD_PATH = f"{LOGS_DIR}/verifier/reward.txt"
"""Where a verifier leaves its reward; `$REWARD_FILE` says so too."""
AGENT_LOG = f"{LOGS_DIR}/agent/opencode.jsonl"
"""The agent's own events, in the boxes of the harness, once it has ended."""
PROXY_LOG = f"{LOGS_DIR}/agent/proxy.log"
"""What went wrong between agent and model, in the same place."""
VERIFY_TIMEOUT_S: float = RolloutRequest.model_fields["verify_timeout_s"].default
"""The budget of verification where the caller names none."""
