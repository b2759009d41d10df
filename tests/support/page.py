"""Runs one page of the documentation: every block of code on it, in order, as a reader would.

    python -m support.page docs/python.md

A line just before a block says what a reader cannot see:

    <!-- not run: it needs an E2B account -->     why this block cannot run here
    <!-- run first: python                        code that runs before this block, in the language named
    path = "log.db"
    -->
    <!-- run with: server -->                     http://127.0.0.1:8000 on this page is a real server
    <!-- run with: fleet -->                      FLEET_API_KEY is that of a local Fleet

`VLLM_URL` and the like lead to the scripted model, so that `endpoint="vllm"` works.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support.paths import ROOT

RUN = ("python", "console", "sh", "bash", "toml", "json")
"""What is run or read; blocks of other languages, or of none, are pictures and output."""
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$", re.M | re.S)
MARK = re.compile(r"<!-- (?P<kind>not run|run first|run with): (?P<text>.+?)\s*-->", re.S)
COMMAND = re.compile(r"^(\$ |rollcage |pip install )", re.M)


class Block(NamedTuple):
    """A piece of code on a page."""

    line: int
    language: str
    code: str
    reason: str = ""
    """Why it cannot run here; empty where it can."""


def blocks(page: str) -> Iterator[Block]:
    """Every block of this page, those in `run first` included."""
    end = 0
    for found in BLOCK.finditer(page):
        line, reason = page.count("\n", 0, found.start()) + 1, ""
        for mark in MARK.finditer(page, end, found.start()):
            if mark["kind"] == "run first":
                language, _, code = mark["text"].partition("\n")
                yield Block(line, language.strip(), code)
            elif mark["kind"] == "not run" and not page[mark.end() : found.start()].strip():
                reason = mark["text"]
        end = found.end()
        yield Block(line, found["language"], found["code"], reason)


def unmarked_commands(page: str) -> list[int]:
    """Lines of blocks that hold commands and do not say so: they would never be run."""
    return [
        block.line for block in blocks(page) if not block.language and not block.reason and COMMAND.search(block.code)
    ]


def run(path: Path) -> None:
    """Run this page; whatever goes wrong names the line of its block."""
    page, names = path.read_text(), dict[str, Any]()
    with ExitStack() as stack:
        stack.enter_context(_models())
        needs = {mark["text"] for mark in MARK.finditer(page) if mark["kind"] == "run with"}
        if "fleet" in needs:
            stack.enter_context(_fleet())
        if "server" in needs:
            address = stack.enter_context(_server())
            page = re.sub(r"(127\.0\.0\.1|localhost):8000\b", address.removeprefix("http://"), page)
        for block in blocks(page):
            if block.language in RUN and not block.reason:
                print(f"{path.name}:{block.line} {block.language}", flush=True)
                try:
                    _run(block, names, f"{path.name}:{block.line}")
                except Exception as error:
                    raise RuntimeError(f"{path.name}:{block.line} does not run: {error}") from error


def _run(block: Block, names: dict[str, Any], where: str) -> None:
    match block.language:
        case "python":
            code = compile(block.code, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            done = eval(code, names)
            if inspect.iscoroutine(done):
                asyncio.run(done)
        case "toml":
            _task(block.code)
        case "json":
            json.loads(block.code)
        case "console":
            _shell("\n".join(line[2:] for line in block.code.splitlines() if line.startswith(("$ ", "> "))))
        case _:
            _shell(block.code)


def _task(text: str) -> None:
    from rollcage.tasks import load

    if re.search(r"^\[metadata", text, re.M):  # of a task.toml of Harbor's
        folder = Path(shutil.copytree(ROOT / "tests/data/harbor/greeting", "block", dirs_exist_ok=True))
        (folder / "task.toml").write_text(text)
        assert not any("unknown" in notice for notice in load(folder).notices)
        return
    path = Path("block.toml")
    path.write_text(text if re.search("^instruction", text, re.M) else f'instruction = "x"\n{text}')
    load(path)


def _shell(script: str) -> None:
    ended = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=300)
    if ended.returncode:
        raise RuntimeError(f"exit code {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """These variables for a while: a page may run inside the tests, and later tests must not inherit them."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _models() -> Iterator[None]:
    """Every endpoint that the environment can name is the scripted model."""
    from anyio.from_thread import start_blocking_portal

    from rollcage.settings import KINDS, variable
    from rollcage.simulators import ScriptedModel
    from rollcage.types import ScriptedTurn

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(ScriptedModel()) as model:
        endpoint = model.endpoint([ScriptedTurn(text="Done.")])
        values = {"base_url": endpoint.base_url, "api_key": endpoint.key.get_secret_value(), "model": endpoint.model}
        with _environment({variable(kind, field): value for kind in KINDS for field, value in values.items()}):
            yield


@contextmanager
def _fleet() -> Iterator[None]:
    from anyio.from_thread import start_blocking_portal

    from rollcage.simulators.fleet import FleetRuntime

    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(FleetRuntime()) as fleet,
        _environment({"FLEET_API_KEY": fleet.key, "FLEET_BASE_URL": fleet.base_url}),
    ):
        yield


@contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, "-m", "rollcage", "serve", "--port", "0", "--json", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
