"""Runs mini-swe-agent in a box: its own agent, environment and `mini.yaml`; each message is printed as it comes."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
if not (ROOT / TAG).is_dir():
    sys.exit(f"mini-swe-agent has no wheels here for Python {sys.version.split()[0]}")
sys.path[:0] = [f"{ROOT}/any", f"{ROOT}/{TAG}"]

import requests  # noqa: E402
import yaml  # noqa: E402
from minisweagent import package_dir  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.openrouter_model import OpenRouterModel  # noqa: E402
from minisweagent.models.utils.actions_toolcall import BASH_TOOL  # noqa: E402
from minisweagent.utils.serialize import recursive_merge  # noqa: E402


class ModelRefused(Exception):
    """The model's side says that asking again is in vain."""


class Model(OpenRouterModel):
    """Asks the gateway; a model may take as long as it likes."""

    abort_exceptions = [ModelRefused, KeyboardInterrupt]

    def __init__(self, base_url, key, session, **config):
        super().__init__(**config)
        self._url, self._session = f"{base_url}/chat/completions", requests.Session()
        self._session.trust_env = False
        self._session.headers.update({"Authorization": f"Bearer {key}", "x-session-id": session})

    def _query(self, messages, **kwargs):
        body = {"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL]}
        answer = self._session.post(self._url, json={**body, **self.config.model_kwargs, **kwargs})
        if answer.status_code != 200:
            kind = ModelRefused if 400 <= answer.status_code < 500 and answer.status_code != 429 else RuntimeError
            raise kind(f"HTTP {answer.status_code}: {answer.text[:500]}")
        return answer.json()


class PrintingAgent(DefaultAgent):
    """Prints what joins its history."""

    def add_messages(self, *messages):
        """As they come."""
        for message in messages:
            tell({"type": "message", "message": without_answer(message)})
        return super().add_messages(*messages)


def without_answer(message):
    """A message that says no more of the model's answer than what it used: the rest is in the log already."""
    extra = message.get("extra") or {}
    if "response" not in extra:
        return message
    return {**message, "extra": {**extra, "response": {"usage": extra["response"].get("usage")}}}


def tell(event):
    """One line of JSON."""
    sys.stdout.write(json.dumps(event, default=str) + "\n")
    sys.stdout.flush()


def main():
    """Work on what stdin asks for; the exit code says whether it was submitted."""
    orders = json.loads(sys.stdin.buffer.read())
    config = yaml.safe_load((package_dir / "config" / "mini.yaml").read_text())
    config["agent"]["cost_limit"] = 0
    if orders["system_prompt"]:
        # Its own is a template: what a user writes is not.
        config["agent"]["system_template"] = "{{ rollcage_system_prompt }}"
    config = recursive_merge(config, orders["config"])
    config["model"].get("model_kwargs", {}).pop("drop_params", None)  # litellm's
    tell({"type": "session", "session": orders["session"]})
    lent = {name: orders[name] for name in ("base_url", "key", "session")}
    model = Model(**lent, model_name=orders["model"], **config["model"])
    try:
        agent = PrintingAgent(model, LocalEnvironment(**config["environment"]), **config["agent"])
        ended = agent.run(orders["task"], rollcage_system_prompt=orders["system_prompt"])
    except Exception as error:  # noqa: BLE001 - it is in its history, and has been told
        sys.exit(f"{type(error).__name__}: {error}")
    sys.exit(0 if ended.get("exit_status") == "Submitted" else 1)


main()
