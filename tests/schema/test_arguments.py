"""An argument of a rollout is declared once: every door has it, with its words, and none has one of its own."""

from __future__ import annotations

import runpy
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import click
import pytest
from fastapi import FastAPI

from opencode_env.models import RolloutArguments
from rollcage import run_group
from rollcage.cli import request as typed
from rollcage.cli import rollcage
from rollcage.errors import UsageError
from rollcage.jobs import task_file
from rollcage.schema.groups import GroupRequest
from rollcage.schema.option import Option, option_name
from rollcage.schema.request import RolloutRequest
from rollcage.server import api
from rollcage.server.mcp_call import RolloutTool
from rollcage.server.mcp_tools import EVERY_TOOL, TOOLS, RunArguments, run_rollout
from support.paths import SCRIPTS

if TYPE_CHECKING:
    from rollcage.server.service import Service

FIELDS = RolloutRequest.model_fields
NOT_TYPED = {"setup_shell", "checks", "solution", "disable_thinking", "idempotency_key"}
"""Arguments without an option: older shapes of others, what only files hold, and what a command makes no use of."""


def options_of_run() -> dict[str, click.Option]:
    run = rollcage.commands["run"]
    params = run.get_params(click.Context(run))
    return {str(param.name): param for param in params if isinstance(param, click.Option)}


def openapi(app: FastAPI, name: str = "RolloutRequest") -> dict[str, Any]:
    found: dict[str, Any] = app.openapi()["components"]["schemas"][name]["properties"]
    return found


@pytest.fixture(scope="module")
def http() -> dict[str, Any]:
    """The body of the server's own POST /rollouts."""
    app = FastAPI()
    app.include_router(api._rollouts(cast("Service", None)))
    return openapi(app)


def test_every_door_has_the_same_arguments(http: dict[str, Any]) -> None:
    mcp = TOOLS["run_rollout"].input_schema["properties"]
    assert http.keys() == FIELDS.keys() == mcp.keys() - {"on_disconnect"}
    assert RolloutArguments.__annotations__.keys() == FIELDS.keys() - {"instruction"} | {"on_disconnect"}
    of_the_command = {"as_json", "build_image", "follow", "otlp", "otlp_content", "require"}
    of_the_command |= {"help", "_click_default_help"}
    of_a_group = GroupRequest.model_fields.keys() - FIELDS.keys()
    assert (
        of_a_group == {"n", "min_usable"} == EVERY_TOOL["start_group"].input_schema["properties"].keys() - FIELDS.keys()
    )
    assert options_of_run().keys() - of_the_command - of_a_group == FIELDS.keys() - NOT_TYPED
    assert options_of_run().keys() >= of_a_group <= signature(run_group).parameters.keys()
    assert RunArguments.model_fields.keys() - FIELDS.keys() == {"on_disconnect"}


def test_every_door_says_the_same_words(http: dict[str, Any]) -> None:
    mcp, options = TOOLS["start_rollout"].input_schema["properties"], options_of_run()
    for name, field in FIELDS.items():
        assert field.description and http[name]["description"] == mcp[name]["description"] == field.description
        if name not in NOT_TYPED:
            first = " ".join(field.description.split()).split("`")[0]
            assert (options[name].help or "").startswith(first), name
            assert option_name(name) in options[name].opts, name
            assert "_" not in "".join(options[name].secondary_opts), name


def test_a_new_argument_shows_at_every_door(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(RolloutRequest):
        """One more."""

        brand_new_s: Annotated[float, Option("-x")] = 2.5
        """What nobody thought of; see `base_url`."""

    app = FastAPI()

    async def start(body: RolloutRequest) -> None: ...

    start.__annotations__["body"] = Longer
    app.post("/rollouts")(start)
    assert "nobody thought of" in openapi(app, "Longer")["brand_new_s"]["description"]
    monkeypatch.setitem(run_rollout.__annotations__, "wanted", Longer)
    tool = RolloutTool(run_rollout)
    assert "nobody thought of" in tool.input_schema["properties"]["brand_new_s"]["description"]
    monkeypatch.setattr(typed, "RolloutRequest", Longer)
    [option] = [each for each in typed.run_options() if each.name == "brand_new_s"]
    assert option.opts == ["--brand-new", "-x"]
    assert option.help == "What nobody thought of; see --base-url.  [default: 2.5]"


def test_the_types_of_the_clients_are_made_from_the_request() -> None:
    made = runpy.run_path(str(SCRIPTS / "arguments.py"))
    assert made["TARGET"].read_text() == made["arguments"](), "run scripts/arguments.py"


def test_options_mean_what_the_arguments_mean(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)")
    words = ["-i", "do it", "--setup", "a", "--setup", "b", "--agent-timeout", "5", "--verify-in", "fresh"]
    words += [
        "--upload-files",
        f"x/a.py={tmp_path}/a.py",
        "--test-script",
        f"{tmp_path}/a.py",
        "--metadata",
        '{"a": 1}',
    ]
    words += ["--no-thinking", "--keep", "/home/user/x", "--setup-hosts", "index.example", "--enabled-tools", "bash"]
    words += ["--api-key", "sk-hidden", "--group-id", "g", "--system-prompt", "be brief"]
    run = rollcage.commands["run"]
    options = run.make_context("run", list(words)).params
    assert "sk-hidden" not in repr(options)
    file = typed.typed_task(None, {name: value for name, value in options.items() if name in FIELDS})
    task = file.task
    assert (task.setup, task.limits.agent_timeout_s, task.verify_in) == (("a", "b"), 5, "fresh")
    assert (task.files, task.test_script, task.keep) == ({"x/a.py": "print(1)"}, "print(1)", ("/home/user/x",))
    assert (file.metadata, file.group_id, file.endpoint.thinking) == ({"a": 1}, "g", False)
    assert (file.sandbox.setup_hosts, file.agent.enabled_tools) == (("index.example",), ("bash",))
    assert (file.endpoint.api_key.get_secret_value(), file.agent.system_prompt) == ("sk-hidden", "be brief")


def test_an_error_is_spelled_as_its_reader_types() -> None:
    error = UsageError("has no address", argument="base_url", remedy="give {base_url} or {timeout_s}, or {HOME}")
    assert str(error) == "base_url: has no address; give base_url or timeout_s, or HOME"
    assert error.told(typed.as_option) == "--base-url: has no address; give --base-url or --timeout, or HOME"
    with pytest.raises(UsageError, match="nothing to do; name a task file or give instruction"):
        task_file(None, {})
