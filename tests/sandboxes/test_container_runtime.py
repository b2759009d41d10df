"""An engine that answers and whose runtime cannot start anything: one clear reason, wherever it is met."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcage.errors import SetupError
from rollcage.sandboxes.container.provider import ContainerProvider
from rollcage.types import SandboxSpec
from support.commands import rollcage
from support.container_engine import need_podman, podman, trouble

WORDS = "unknown version specified of this machine"


@pytest.fixture
def broken() -> Iterator[str]:
    """A podman whose runtime refuses, as crun does on machines with both kinds of cgroups."""
    need_podman()
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as name:
        runtime = Path(name) / "crun"
        runtime.write_text(f"#!/bin/sh\necho '{WORDS}' >&2\nexit 1\n")
        runtime.chmod(0o755)
        with podman(Path(name), str(runtime)) as address:
            yield address


async def test_the_box_the_doctor_and_the_tests_name_the_runtime_as_the_cause(broken: str, tmp_path: Path) -> None:
    async with ContainerProvider(tmp_path / "state", [broken]) as provider:
        with pytest.raises(SetupError, match="cannot start any container") as raised:
            async with provider.open(SandboxSpec(backend="container", system="host")):
                pass
    assert WORDS in str(raised.value)
    assert "runc" in raised.value.remedy
    ended = rollcage(tmp_path, "doctor", "--json", env={"DOCKER_HOST": broken})
    finding = next(each for each in json.loads(ended.stdout)["findings"] if each["name"] == "container engine")
    assert (finding["ok"], finding["needed"]) == (False, False)
    assert WORDS in finding["detail"]


def test_the_container_tests_skip_with_that_reason(broken: str) -> None:
    assert WORDS in trouble(broken)
