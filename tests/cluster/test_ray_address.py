"""A Ray that is not there is told in one line, at once: Ray itself would try for minutes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rollcage.cluster import ray_connection
from rollcage.cluster.ray_connection import check_answers, check_node
from rollcage.errors import SetupError
from support.commands import rollcage


@contextmanager
def answering(said: bytes | None) -> Iterator[str]:
    """Somebody who says this to whoever connects; None: who says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    there, _ = listener.accept()
                except OSError:
                    return
                held.append(there)
                if said is not None:
                    with suppress(OSError):  # who has heard enough is gone
                        there.sendall(said)
                        there.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in held:
            each.close()


@pytest.fixture
def closed() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_the_command_says_which_address_does_not_answer(tmp_path: Path, closed: str) -> None:
    address = f"localhost:{closed.rpartition(':')[2]}"
    for way, env in (("auto", {"RAY_ADDRESS": address}), (address, {})):
        done = rollcage(tmp_path, "eval", "examples", "-m", "scripted", "--ray", way, env=env)
        assert done.returncode == 3, done.stderr
        assert "no Ray cluster answers at" in done.stderr and "Connection refused" in done.stderr, done.stderr
        assert "ray start --head" in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("head", "'head' is no address; it looks like head:6379"),
        ("ray://head:10001", "Ray Client"),
        ("no-such-host.invalid:6379", "no Ray cluster answers at no-such-host.invalid:6379"),
    ],
)
def test_what_cannot_be_an_address_is_refused(tmp_path: Path, address: str, words: str) -> None:
    done = rollcage(tmp_path, "eval", "examples", "-m", "scripted", "--ray", address)
    assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    done = rollcage(tmp_path, "eval", "examples", "-m", "scripted", "--ray", "auto", env=env)
    assert done.returncode != 0 and "pip install 'rollcage[ray]'" in done.stderr, done.stderr


def test_who_is_silent_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "ANSWER_S", 0.2)
    with answering(None) as address, pytest.raises(SetupError, match=r"no Ray cluster answers .* within 0\.2 s"):
        check_answers(address)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_who_is_somebody_else_is_told_from_a_ray(said: bytes) -> None:
    with answering(said) as address, pytest.raises(SetupError, match=r"is no Ray|Connection reset"):
        check_answers(address)


@pytest.mark.parametrize(
    "said", [b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\x00\x10\x00\x00", b"\x15\x03\x03\x00\x02\x02\x46\x00\x00"]
)
def test_settings_of_http_2_and_a_refusal_of_tls_are_a_ray(said: bytes) -> None:
    with answering(said) as address:
        check_answers(address)


def test_a_machine_that_is_no_node_says_how_to_become_one(tmp_path: Path) -> None:
    for number, name in (("12", "bash"), ("self", "raylet")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "comm").write_text(f"{name}\n")
    with pytest.raises(SetupError, match=r"is no node of the Ray cluster at head:6379") as caught:
        check_node("head:6379", tmp_path)
    assert "ray start --address head:6379 --num-cpus 0" in str(caught.value.remedy)
    (tmp_path / "12" / "comm").write_text("raylet\n")
    check_node("head:6379", tmp_path)


@pytest.mark.parametrize(
    ("error", "words", "remedy"),
    [
        (RuntimeError("Version mismatch: The cluster has:\n    Ray: 2.40.0\n"), "The cluster has: Ray: 2.40.0", ""),
        (ConnectionError("Failed to connect"), "cannot be used: Failed to connect", "RAY_AUTH_TOKEN"),
    ],
)
def test_what_ray_says_is_told_whole(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str, remedy: str
) -> None:
    ray = pytest.importorskip("ray")
    from ray._private import utils

    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(utils, "set_sigterm_handler", utils.set_sigterm_handler)
    for name in ("check_answers", "check_node"):
        monkeypatch.setattr(ray_connection, name, lambda address: None)
    monkeypatch.setattr(ray_connection, "found_address", str)
    with pytest.raises(SetupError, match=words) as caught:
        ray_connection._connect("head:6379")
    assert remedy in str(caught.value.remedy)
