"""OpenCode's configuration, as a value."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from pydantic import SecretStr

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode.agent import OpenCode
from rollcage.agents.opencode.config import config_of, environment_of, permissions_of
from rollcage.agents.opencode.package import package_for
from rollcage.agents.packages import fetch
from rollcage.errors import AgentError, SetupError, UsageError
from rollcage.types import AgentSpec, Endpoint

LENT = Endpoint(base_url="http://127.0.0.1:7000/v1", model="model", key=SecretStr("lent"))


def test_the_build_fits_the_machine() -> None:
    assert package_for("x86_64", ["sse2", "avx2"]).name == "opencode-linux-x64"
    assert package_for("x86_64", ["sse2"]).name == "opencode-linux-x64-baseline"
    assert package_for("aarch64", []).name == "opencode-linux-arm64"
    with pytest.raises(SetupError, match="riscv64"):
        package_for("riscv64", [])


async def test_a_package_that_is_not_what_was_pinned_is_never_used(tmp_path: Path) -> None:
    """Really asks npm for the package, with another hash pinned."""
    pinned = package_for("aarch64", [])._replace(name="is-number", version="7.0.0")
    with pytest.raises(AgentError, match="SHA-512"):
        await fetch(pinned, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_extra_configuration_is_merged_last_and_deep() -> None:
    config = config_of(AgentSpec(config={"agent": {"build": {"temperature": 0.5}}, "username": "ann"}), LENT)
    assert config["agent"]["title"] == {"disable": True}
    assert config["agent"]["build"] == {"temperature": 0.5}
    assert config["username"] == "ann"


def test_the_lent_endpoint_is_the_only_one_it_knows() -> None:
    config = config_of(AgentSpec(), LENT)
    assert config["enabled_providers"] == ["rollcage"]
    assert config["provider"]["rollcage"]["options"]["baseURL"] == LENT.base_url
    assert json.loads(environment_of(config)["OPENCODE_CONFIG_CONTENT"]) == config


@pytest.mark.parametrize("driver", ["", "run", "serve"])
def test_a_system_prompt_that_no_variable_can_carry_is_refused_by_its_name(tmp_path: Path, driver: str) -> None:
    agent = OpenCode(Downloads(tmp_path))
    agent.check(AgentSpec(driver=driver, system_prompt="x" * 100_000))
    with nullcontext() if driver == "serve" else pytest.raises(UsageError, match=r"system_prompt: .*120 kB.*serve"):
        agent.check(AgentSpec(driver=driver, system_prompt="x" * 130_000))


def test_only_enabled_tools_are_allowed_and_the_rule_for_the_rest_comes_first() -> None:
    rules = permissions_of(AgentSpec(enabled_tools=("bash",)))
    assert next(iter(rules.items())) == ("*", "deny")
    assert rules["bash"] == "allow"
    assert rules["read"] == rules["edit"] == rules["webfetch"] == "deny"


def test_the_editing_tools_come_and_go_together() -> None:
    assert permissions_of(AgentSpec(disabled_tools=("edit", "write", "apply_patch")))["edit"] == "deny"
    with pytest.raises(UsageError, match="together"):
        permissions_of(AgentSpec(disabled_tools=("write",)))


def test_a_tool_opencode_does_not_have_is_named() -> None:
    with pytest.raises(UsageError, match="fly"):
        permissions_of(AgentSpec(disabled_tools=("fly",)))
