"""What rollcage takes from its surroundings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest

from rollcage.errors import UsageError
from rollcage.settings import KINDS, Settings, variable
from rollcage.simulators import ScriptedModel
from rollcage.types import ScriptedTurn


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


def test_the_npm_registry_comes_from_a_variable_or_from_the_users_npmrc(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert Settings.from_environ(environ).npm_registry == ""
    (tmp_path / ".npmrc").write_text('; mine\nfund=false\nregistry = "http://registry.test:4873/"\n')
    assert Settings.from_environ(environ).npm_registry == "http://registry.test:4873/"
    environ["npm_config_registry"] = "http://other.test/"
    assert Settings.from_environ(environ).npm_registry == "http://other.test/"


def test_the_longest_answer_is_a_number_of_megabytes() -> None:
    assert Settings.from_environ({"HOME": "/x"}).answer_limit_mb == 64
    assert Settings.from_environ({"HOME": "/x", "ROLLCAGE_ANSWER_LIMIT_MB": " 8 "}).answer_limit_mb == 8
    for wrong in ("0", "-1", "1.5", "much"):
        with pytest.raises(UsageError, match="ROLLCAGE_ANSWER_LIMIT_MB"):
            Settings.from_environ({"HOME": "/x", "ROLLCAGE_ANSWER_LIMIT_MB": wrong})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLCAGE_HOME", str(tmp_path / "state"))
    for name in ("VLLM_URL", "VLLM_API_KEY", "VLLM_MODEL", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_file_of_variables_in_the_working_directory_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "# comment",
        "",
        "VLLM_URL = http://gpu:8000",
        "export VLLM_MODEL='of the file'",
        'VLLM_API_KEY="k=1"',
        "odd",
    ]
    (folder / ".env").write_text("\n".join(lines))
    found = Settings.from_environ().endpoints["vllm"]
    assert (found.base_url, found.model, found.api_key.get_secret_value()) == ("http://gpu:8000", "of the file", "k=1")
    monkeypatch.setenv("VLLM_MODEL", "set")
    assert Settings.from_environ().endpoints["vllm"].model == "set", "never over what is set"
    monkeypatch.setenv("VLLM_MODEL", "")
    assert Settings.from_environ().endpoints["vllm"].model == "", "not over what is set to nothing either"
    monkeypatch.setenv("ROLLCAGE_DOTENV", "0")
    assert Settings.from_environ().endpoints["vllm"].base_url == ""


def test_a_key_that_is_set_does_not_go_where_a_file_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may be somebody else's."""
    (folder / ".env").write_text("OPENAI_BASE_URL=http://theirs\nOPENAI_MODEL=m\nVLLM_URL=http://gpu")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    endpoints = Settings.from_environ().endpoints
    assert (endpoints["openai"].base_url, endpoints["openai"].model) == ("", "m")
    assert endpoints["vllm"].base_url == "http://gpu"


def test_what_is_no_file_of_variables_is_left_alone(folder: Path) -> None:
    os.mkfifo(folder / ".env")
    assert Settings.from_environ().endpoints["vllm"].base_url == ""
    assert Settings.from_environ({"HOME": "/x"}).endpoints["vllm"].base_url == ""


async def test_the_command_and_the_published_catalog_read_it(folder: Path) -> None:
    run = [sys.executable, "-m", "rollcage", "run", "-i", "true", "--agent", "shell", "-e", "local", "--json"]
    async with ScriptedModel() as model:
        endpoint = model.endpoint([ScriptedTurn(text="hi")])
        said = {"BASE_URL": endpoint.base_url, "API_KEY": endpoint.key.get_secret_value(), "MODEL": endpoint.model}
        said = {f"ROLLCAGE_{name}": value for name, value in said.items()}
        (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in said.items()))
        done = await anyio.run_process(run, check=False)
        assert done.returncode == 0, done.stderr
        off = await anyio.run_process(run, check=False, env={**os.environ, "ROLLCAGE_DOTENV": "0"})
        assert off.returncode == 2 and b"ROLLCAGE_BASE_URL" in off.stderr
    (folder / ".env").write_text("VLLM_URL=http://gpu:8000\n")
    code = "from opencode_env.server.catalog import resolve_endpoint; print(resolve_endpoint('vllm').base_url)"
    told = await anyio.run_process([sys.executable, "-c", code])
    assert told.stdout.strip() == b"http://gpu:8000/v1"
