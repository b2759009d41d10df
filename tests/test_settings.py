"""What rollcage takes from its surroundings."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.settings import KINDS, Settings, variable


def test_the_state_of_root_lives_in_var_lib() -> None:
    assert Settings.from_environ({"HOME": "/root"}, root=True).home == Path("/var/lib/rollcage")


def test_the_state_of_a_user_lives_below_the_home_directory() -> None:
    assert Settings.from_environ({"HOME": "/home/ann"}, root=False).home == Path("/home/ann/.local/state/rollcage")


def test_xdg_state_home_moves_it() -> None:
    environ = {"HOME": "/home/ann", "XDG_STATE_HOME": "/data/state"}
    assert Settings.from_environ(environ, root=False).home == Path("/data/state/rollcage")


def test_a_relative_xdg_state_home_is_ignored_as_its_rules_say() -> None:
    environ = {"HOME": "/home/ann", "XDG_STATE_HOME": "state"}
    assert Settings.from_environ(environ, root=False).home == Path("/home/ann/.local/state/rollcage")


@pytest.mark.parametrize("root", [True, False])
def test_rollcage_home_wins_over_everything(root: bool) -> None:
    environ = {"ROLLCAGE_HOME": "/tmp/x", "HOME": "/home/ann", "XDG_STATE_HOME": "/data"}
    assert Settings.from_environ(environ, root=root).home == Path("/tmp/x")


def test_a_relative_rollcage_home_is_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environ({"ROLLCAGE_HOME": "state"}).home == tmp_path / "state"


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    with pytest.raises(UsageError, match="ROLLCAGE_HOME"):
        Settings.from_environ({}, root=False)


def test_every_variable_of_every_endpoint_is_read() -> None:
    names = [variable(kind, field) for kind in KINDS for field in ("base_url", "api_key", "model")]
    assert names[:3] == ["VLLM_URL", "VLLM_API_KEY", "VLLM_MODEL"]
    assert "OPENAI_BASE_URL" in names and "HF_ROUTER_API_KEY" in names and "ROLLCAGE_MODEL" in names
    settings = Settings.from_environ({"HOME": "/x", **{name: f" value of {name}\n" for name in names}})
    for kind in KINDS:
        found = settings.endpoints[kind]
        assert found.base_url == f"value of {variable(kind, 'base_url')}"
        assert found.api_key.get_secret_value() == f"value of {variable(kind, 'api_key')}"
        assert found.model == f"value of {variable(kind, 'model')}"


def test_keys_show_nowhere() -> None:
    settings = Settings.from_environ({"HOME": "/x", "OPENAI_API_KEY": "sk-hidden"})
    assert "sk-hidden" not in repr(settings) + str(settings) + settings.model_dump_json()


@pytest.mark.parametrize(("value", "debug"), [("", False), ("0", False), ("false", False), ("1", True), ("yes", True)])
def test_debug_is_a_switch(value: str, debug: bool) -> None:
    assert Settings.from_environ({"HOME": "/x", "ROLLCAGE_DEBUG": value}).debug is debug


def test_an_empty_no_color_means_nothing() -> None:
    assert not Settings.from_environ({"HOME": "/x", "NO_COLOR": ""}).no_color
    assert Settings.from_environ({"HOME": "/x", "NO_COLOR": "1"}).no_color
