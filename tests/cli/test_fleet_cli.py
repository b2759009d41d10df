"""`rollcage fleet`, as a person and as a program type it, against a local Fleet in another process."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import anyio
import pytest

from rollcage.simulators import FleetRuntime
from support.commands import environ, rest, rollcage


def test_the_demo_is_the_same_each_time(tmp_path: Path) -> None:
    first, again = rollcage(tmp_path, "fleet", "demo"), rollcage(tmp_path, "fleet", "demo", "--seed", "7")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == again.stdout
    assert "reward 1.0\n" in first.stdout
    assert "0 instances left running" in first.stdout


@pytest.mark.slow
def test_the_demo_is_another_with_another_seed(tmp_path: Path) -> None:
    first = rollcage(tmp_path, "fleet", "demo")
    other = json.loads(rollcage(tmp_path, "fleet", "demo", "--seed", "8", "--json").stdout)
    assert (other["reward_before"], other["reward"], other["left_running"]) == (0.0, 1.0, 0)
    assert other["calls"][0]["answer"]["tickets"][0]["customer"] not in first.stdout


def test_environments_are_listed(tmp_path: Path, fleet_env: dict[str, str]) -> None:
    assert "ticket-desk-eu  v1.1.0" in rollcage(tmp_path, "fleet", "ls", env=fleet_env).stdout
    listed = json.loads(rollcage(tmp_path, "fleet", "ls", "--json", env=fleet_env).stdout)
    assert [one["key"] for one in listed] == ["ticket-desk", "ticket-desk-eu"]


def test_an_environment_is_tried_and_released(tmp_path: Path, fleet_env: dict[str, str]) -> None:
    done = rollcage(tmp_path, "fleet", "run", "ticket-desk:1.0.0", "--seed", "3", env=fleet_env)
    assert done.returncode == 0
    assert done.stdout.startswith("provisioned  ticket-desk:v1.0.0, instance local-")
    assert done.stdout.endswith("released\n")


def test_tools_are_shown_and_given_in_openais_format(tmp_path: Path, fleet_env: dict[str, str]) -> None:
    shown = rollcage(tmp_path, "fleet", "tools", "ticket-desk", env=fleet_env).stdout
    assert "assign_ticket: Give a ticket to a team." in shown
    assert "  limit (optional): " in shown
    given = json.loads(rollcage(tmp_path, "fleet", "tools", "ticket-desk", "--json", env=fleet_env).stdout)
    assert given["tools"][1]["function"]["parameters"]["$defs"]["Period"]
    assert given["report"]["status"] == "whole"


def test_a_tool_is_called(tmp_path: Path, fleet_env: dict[str, str]) -> None:
    first = rollcage(
        tmp_path, "fleet", "call", "ticket-desk", "list_tickets", '{"limit": 2}', "--seed", "4", env=fleet_env
    )
    assert len(json.loads(first.stdout)["tickets"]) == 2
    assert "list_tickets on mcp" in first.stderr
    piped = ("fleet", "call", "ticket-desk", "list_tickets", "-", "--seed", "4", "--json")
    again = rollcage(tmp_path, *piped, env=fleet_env, stdin='{"limit": 2}')
    assert json.loads(again.stdout)["structured"] == json.loads(first.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run", "desk"), 2, "'desk' not found; rollcage fleet ls shows what there is"),
        (("call", "ticket-desk", "nothing"), 2, "no tool 'nothing' on 'mcp', 'api/v1/mcp'; there are: list_tickets"),
        (("call", "ticket-desk", "read_ticket", '{"ticket_id": "x"}'), 3, "ticket_id: 'x' is not of type 'integer'"),
        (("call", "ticket-desk", "read_ticket", "{"), 2, "ARGS: this is no JSON"),
        (("run", "ticket-desk", "--endpoint", "x=y"), 2, "'y' is no http address"),
    ],
)
def test_what_is_wrong_is_said_in_one_place(
    tmp_path: Path, fleet_env: dict[str, str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = rollcage(tmp_path, "fleet", *arguments, env=fleet_env)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr


def test_no_key_and_a_wrong_key_are_told_apart(tmp_path: Path, fleet_env: dict[str, str]) -> None:
    none = rollcage(tmp_path, "fleet", "ls", "--json")
    assert none.returncode == 3
    assert "set FLEET_API_KEY" in json.loads(none.stdout)["error"]
    wrong = rollcage(tmp_path, "fleet", "run", "ticket-desk", env={**fleet_env, "FLEET_API_KEY": "sk-secret-thing"})
    assert wrong.returncode == 3
    assert "check FLEET_API_KEY" in wrong.stderr
    assert "sk-secret-thing" not in wrong.stderr + wrong.stdout


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (("call", "ticket-desk", "list_tickets"), signal.SIGINT),
        (("call", "ticket-desk", "list_tickets"), signal.SIGTERM),
        (("run", "ticket-desk"), signal.SIGTERM),
        (("tools", "ticket-desk"), signal.SIGINT),
        (("run", "ticket-desk", "-i", "Look.", "-e", "scripted", "--agent", "loop"), signal.SIGINT),
    ],
)
async def test_a_command_that_is_stopped_leaves_no_instance(
    tmp_path: Path, arguments: tuple[str, ...], number: signal.Signals
) -> None:
    async with FleetRuntime() as fleet:
        if arguments[0] == "call":
            fleet.faults.hanging = {"list_tickets"}
        else:
            fleet.faults.boot_s = 600
        env = environ(tmp_path, {"FLEET_API_KEY": fleet.key, "FLEET_BASE_URL": fleet.base_url})
        command = [sys.executable, "-m", "rollcage", "fleet", *arguments]
        with anyio.fail_after(240):
            async with await anyio.open_process(command, env=env) as process:
                while not (fleet.instances and (fleet.faults.boot_s or _busy(fleet))):
                    await anyio.sleep(0.05)
                process.send_signal(number)
                code, _, error = await rest(process)
        assert code == 128 + number, error
        assert "Traceback" not in error
        assert [instance.status for instance in fleet.instances.values()] == ["stopped"]


def _busy(fleet: FleetRuntime) -> bool:
    return any(instance.tools and instance.tools.begun for instance in fleet.instances.values())
