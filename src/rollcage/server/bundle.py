"""A copy of the page that needs no server: the page, and what the server would answer about some rollouts.

What it answers at an address is beside the page as a small script (`rollcagePut(address, value);`), fetched when it is
looked at: a page that is opened as a file may load scripts, and nothing else.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import anyio

from rollcage.errors import UsageError
from rollcage.evaluation.batches import BatchView
from rollcage.evaluation.comparison import compare
from rollcage.events import TurnEnded
from rollcage.runner.batch import batch_view
from rollcage.schema.writing import json_of
from rollcage.server.api_page import board_row, whole_turn
from rollcage.server.auth import ANYONE
from rollcage.server.compact import compact
from rollcage.server.prompts import prompt_text
from rollcage.server.reading import LogReader
from rollcage.store import Store
from rollcage.types import Value

WEB = Path(__file__).parent / "web"
POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file: data:; "
    "base-uri 'none'; form-action 'none'"
)
SHIPPED = ("app.css", "icon.svg", "vendor/markdown.LICENSE.txt")
PAGE = 100
"""Entries of a log that are in memory at a time."""


class Bundled(Value):
    """What an archive holds."""

    rollouts: int
    batches: tuple[str, ...] = ()
    bytes: int
    """How large it is."""


Put = Callable[[str, bytes], None]
"""Keeps the answer of an address."""


def file_of(path: str) -> str:
    """The file that holds what the server answered at a path; the same in api.js."""
    return "data/" + re.sub(r"[^A-Za-z0-9/-]", lambda sign: f"_{ord(sign[0]):x}_", path.removeprefix("/")) + ".js"


def script_of(path: str, value: bytes) -> bytes:
    """The script that tells the page what was answered there."""
    return b"rollcagePut(" + json.dumps(path).encode() + b"," + value + b");\n"


def page_files() -> dict[str, bytes]:
    """The page in one script, for browsers that open it as a file."""
    page = (WEB / "index.html").read_text("utf-8")
    head = [
        '<meta charset="utf-8" />',
        '<meta name="rollcage-mode" content="copy" />',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}" />',
    ]
    page = page.replace(head[0], "\n    ".join(head))
    page = page.replace('<script type="module" src="js/app.js">', '<script defer src="app.js">')
    files = {name: (WEB / name).read_bytes() for name in SHIPPED}
    return {"index.html": page.encode(), "app.js": joined("js/app.js").encode(), **files}


_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";$', re.M)
_EXPORT = re.compile(r"^export (const|let|function|async function|class) (\w+)", re.M)
_EXPORTS = re.compile(r"^(.*?)export ?\{([^{}]*)\};?\s*$", re.M)


def joined(first: str) -> str:
    """The modules of the page as one plain script: each is a function, called once, in the order of their needs."""
    order: dict[str, str] = {}

    def add(name: str) -> None:
        if name in order:
            return
        source = (WEB / name).read_text("utf-8")
        order[name] = ""  # a circle would find it half done, as a browser's modules would
        exported: list[str] = []

        def imported(found: re.Match[str]) -> str:
            other = (WEB / name).parent.joinpath(found[2]).resolve().relative_to(WEB.resolve()).as_posix()
            add(other)
            return f"const {{{found[1].replace(' as ', ': ')}}} = parts[{json.dumps(other)}];"

        def kept(found: re.Match[str]) -> str:
            exported.append(found[2])
            return f"{found[1]} {found[2]}"

        def listed(found: re.Match[str]) -> str:
            for pair in found[2].split(","):
                inner, _, outer = pair.strip().partition(" as ")
                exported.append(f"{outer or inner}: {inner}")
            return found[1]

        source = _EXPORTS.sub(listed, _EXPORT.sub(kept, _IMPORT.sub(imported, source)))
        del order[name]
        order[name] = f"parts[{json.dumps(name)}] = (() => {{\n{source}\nreturn {{ {', '.join(exported)} }};\n}})();\n"

    add(first)
    return '"use strict";\n(() => {\nconst parts = {};\n' + "".join(order.values()) + "})();\n"


async def write_bundle(store: Store, ids: Sequence[str], batches: Sequence[str], target: Path) -> Bundled:
    """Write an archive of these rollouts, and of these batches with all of theirs."""
    part = target.with_name(f"{target.name}.part")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for name, content in page_files().items():
                archive.writestr(name, content)
            count = await _fill(
                store, ids, batches, lambda path, value: archive.writestr(file_of(path), script_of(path, value))
            )
        size = part.stat().st_size
        part.replace(target)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", argument="--output") from error
    finally:
        with suppress(OSError):
            part.unlink()
    return Bundled(rollouts=count, batches=tuple(batches), bytes=size)


async def _fill(store: Store, ids: Sequence[str], batches: Sequence[str], put: Put) -> int:
    views = {name: await batch_view(store, name) for name in batches}
    wanted = dict.fromkeys([*ids, *(row.rollout_id for view in views.values() for row in view.current)])
    _put_batches(views, put)
    rows = [board_row(await store.summary(each)) for each in wanted]
    rows.sort(key=lambda row: -(row.started_at or 0))
    listed = b"[" + b",".join(json_of(row) for row in rows) + b"]"
    put("/page/board", b'[["rollouts",' + listed + b'],["ready",{}]]')
    async with anyio.create_task_group() as tasks:
        reader = LogReader(store, tasks)
        for rollout_id in wanted:
            async for path, value in _rollout(reader, rollout_id):
                await anyio.to_thread.run_sync(put, path, value)
    return len(wanted)


def _put_batches(views: dict[str, BatchView], put: Put) -> None:
    reports = {name: view.report() for name, view in views.items()}
    light = [report.model_copy(update={"tasks": (), "broken": ()}) for report in reports.values()]
    put("/batches?limit=100", b'{"batches":[' + b",".join(map(json_of, light)) + b"]}")
    for name, report in reports.items():
        put(f"/batches/{_quoted(name)}", json_of(report))
        for other in views.keys() - {name}:
            put(f"/batches/{_quoted(name)}/compare/{_quoted(other)}", json_of(compare(views[name], views[other])))


async def _rollout(reader: LogReader, rollout_id: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """What the page asks for of one rollout, address by address."""
    own, page = f"/rollouts/{_quoted(rollout_id)}", f"/page/rollouts/{_quoted(rollout_id)}"
    told: list[bytes] = []
    after = 0
    while entries := await reader.store.read(rollout_id, after=after, limit=PAGE):
        after = entries[-1].seq
        for entry in entries:
            told.append(b'["entry",' + json.dumps(compact(entry)).encode() + b"]")
            if isinstance(entry.event, TurnEnded):
                yield f"{page}/turns/{entry.seq}", whole_turn(entry.event.turn).encode()
                yield (
                    f"{page}/turns/{entry.seq}/prompt",
                    json_of(await prompt_text(reader.store, rollout_id, entry.seq)),
                )
    yield f"{page}/events", b"[" + b",".join(told) + b"]"
    yield f"{own}/merge", json_of(await reader.merge(rollout_id, ANYONE))
    yield f"{own}/result", b"".join([piece async for piece in await reader.written(rollout_id, ANYONE, wait_s=0)])


def _quoted(name: str) -> str:
    """As the page writes it into an address (`encodeURIComponent`)."""
    return quote(name, safe="-_.!~*'()")
