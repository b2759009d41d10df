"""The container image and what OpenEnv's validator does with it, as far as can be seen without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import yaml  # type: ignore[import-untyped]

from rollcage.server.mcp_tools import TOOLS
from support.paths import ROOT
from support.served import served

VALIDATION = ROOT / "validation"


def _instructions(path: Path) -> list[tuple[str, str]]:
    """What a Dockerfile says, line by line: a word, and what follows it."""
    text = re.sub(r"\\\n", " ", path.read_text())
    lines = [line.strip() for line in text.splitlines()]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def test_the_image_is_one_that_the_validator_takes() -> None:
    said = _instructions(ROOT / "Dockerfile")
    words = [word for word, _ in said]
    last = len(words) - words[::-1].index("FROM")
    assert "VOLUME" not in words, "the validator refuses images that declare one"
    assert ("USER", "rollcage") in said[last:] and "HEALTHCHECK" in words[last:] and ("EXPOSE", "8000") in said
    assert _instructions(VALIDATION / "Dockerfile")[0] == ("FROM", "rollcage")


def test_everything_the_image_copies_is_let_through_to_its_build() -> None:
    let_through = set((ROOT / ".dockerignore").read_text().split())
    copied = [rest.split()[:-1] for word, rest in _instructions(ROOT / "Dockerfile") if word == "COPY"]
    names = {name for group in copied for name in group if not group[0].startswith("--from")}
    assert names == {"pyproject.toml", "README.md", "LICENSE", "src"}
    assert {f"!{name}" for name in names} <= let_through and "*" in let_through
    assert all((ROOT / name).exists() for name in names)


def test_the_two_manifests_differ_in_nothing_but_how_to_run_it() -> None:
    plain: dict[str, Any] = yaml.safe_load((ROOT / "openenv.yaml").read_text())
    run: dict[str, Any] = yaml.safe_load((VALIDATION / "openenv.yaml").read_text())
    assert run["validation"].pop("execution")["probe_path"] == "runtime.json"
    assert run == plain and plain["validation"]["capabilities"]["declared_tools"] == list(TOOLS)


# OpenEnv's collector opens its socket in a way that the websockets library deprecates.
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_validators_plan_passes_on_a_server_started_as_its_container_starts_it(tmp_path: Path) -> None:
    from openenv.validation.graders.runtime.basic import (
        ObservationSchemaGrader,
        RewardWellFormedGrader,
        StateContractGrader,
    )
    from openenv.validation.manifest import NormalizedManifestV2
    from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
    from openenv.validation.runtime.collector import collect_runtime_evidence
    from openenv.validation.runtime.contracts import load_runtime_plan

    manifest = OpenEnvYamlParser().parse(VALIDATION)
    assert isinstance(manifest, NormalizedManifestV2)
    plan = load_runtime_plan(VALIDATION, manifest.execution)
    [command] = [rest for word, rest in _instructions(VALIDATION / "Dockerfile") if word == "CMD"]
    assert yaml.safe_load(command)[:2] == ["rollcage", "serve"] and "--insecure-no-key" in command
    # A home without an agent in it, as there.
    async with served(tmp_path / "home", "--insecure-no-key") as server:
        evidence = await anyio.to_thread.run_sync(
            lambda: collect_runtime_evidence(server.url, plan, episode_timeout_s=100)
        )
    assert evidence.failure_reason is None and len(evidence.exchanges) == 2 + 2 * len(plan.actions)
    subject = SimpleNamespace(manifest=manifest, runtime_evidence=evidence)
    for grader in (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader()):
        verdict = await anyio.to_thread.run_sync(grader.run, subject)
        assert verdict.status.value == "pass", verdict
