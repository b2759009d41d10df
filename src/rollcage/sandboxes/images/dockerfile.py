"""Makes an image from a Dockerfile, with whichever of buildah, podman and docker works here.

What RUN does is done by that builder, with its rights and its network: build only what you would run yourself.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from rollcage.errors import SandboxError, UsageError
from rollcage.sandboxes.images.build import Built, LayeredProvider, Say
from rollcage.sandboxes.images.builders import ImageBuilder, builder
from rollcage.sandboxes.images.catalog import check_name
from rollcage.sandboxes.images.imports import ImageSource, import_image
from rollcage.sandboxes.mirrors import OFFLINE, READ_BY, Mirrors, mirrors

TIMEOUT_S = 600.0
"""How long a build may take unless somebody says otherwise."""
_SHOWN, _LONGEST = 12, 400
"""Lines of a build that failed, and characters of each: builders written in Go print their structures."""
_STOP_S = 10.0
"""For a builder to unmount what it has mounted, before it is killed."""
_CERTIFICATES = "/tmp/warm.crt"  # noqa: S108 (in a build)
_STEP = re.compile(r"STEP \d+/\d+ ?: (.*)", re.IGNORECASE)
_START = re.compile(r"Error: .*\bStartLine:(\d+)")
"""How builders name the instruction they are at; and, of one that they cannot read, its line."""


async def build_dockerfile(
    provider: LayeredProvider,
    name: str,
    context: Path,
    say: Say,
    *,
    warm: str = "",
    timeout_s: float = TIMEOUT_S,
    rebuild: bool = False,
) -> Built:
    """The image of that name, built from a folder with a Dockerfile unless it is there already.

    `warm`: a bash script that is run in it at the end, as root, with the builder's network.

    SandboxError, with the last lines of the build, where it fails or takes too long; nothing is left behind then.
    """
    check_name(name)
    if not (context / "Dockerfile").is_file():
        raise UsageError(f"{context}: there is no Dockerfile in it")
    if provider.images.has(name) and not rebuild:
        return Built(provider.images.get(name), False)
    tool = await anyio.to_thread.run_sync(builder)
    # A tag of ours: whatever else is called so on this machine stays as it is.
    tag = f"localhost/rollcage/{name.lower()}"
    file, steps = context / "Dockerfile", deque[str](maxlen=1)

    def heard(line: str) -> None:
        if _STEP.match(line):
            steps.append(line)
        say(line)

    with provider.images.build_folder() as aside:
        archive = aside / "image.tar"
        try:
            with anyio.fail_after(timeout_s):
                say(f"{tool.name} builds {context}")
                await _build(tool, tag, file, heard)
                if warm:
                    say("installing what the verifier installs")
                    await _build(tool, tag, _warming(aside / "warm", tag, warm, await mirrors()), say)
                await _run([tool.name, *tool.save(tag, str(archive))], f"{tag}: cannot be saved", say)
        except TimeoutError:
            at = f":{number}" if (number := line_of(file, steps)) else ""
            raise SandboxError(f"{file}{at}: {tool.name} had not built it after {timeout_s:g} s") from None
        try:
            source = ImageSource(path=archive)
            return await import_image(
                provider, name, source, say, rebuild=rebuild, own_paths=True, origin=f"Dockerfile of {context}"
            )
        except (SandboxError, UsageError) as error:
            raise SandboxError(f"{file}: boxes cannot be made of its image: {error}") from error


async def _build(tool: ImageBuilder, tag: str, file: Path, say: Say) -> None:
    command = [tool.name, *tool.build, "-t", tag, "-f", str(file), str(file.parent)]
    await _run(command, f"{file}: cannot be built", say, file)


def _warming(folder: Path, tag: str, script: str, found: Mirrors) -> Path:
    """A Dockerfile that goes on from an image by running a script, which finds the package indexes of this machine as
    the machine does. Nothing of an image's /tmp is taken over."""
    folder.mkdir()
    named = {"UV_DEFAULT_INDEX": found.env["PIP_INDEX_URL"]} if "PIP_INDEX_URL" in found.env else {}
    given = {**found.env, **named, **(dict.fromkeys(READ_BY, _CERTIFICATES) if found.certificates else {})}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in given.items())
    (folder / "warm.sh").write_text(exports + script)
    (folder / "warm.crt").write_bytes(found.certificates)
    lines = [f"FROM {tag}", "USER root", "COPY warm.sh warm.crt /tmp/", "RUN bash /tmp/warm.sh"]
    lines += [f"ENV {name}={json.dumps(value)}" for name, value in {**OFFLINE, **named}.items()]
    (folder / "Dockerfile").write_text("\n".join((*lines, "")))
    return folder / "Dockerfile"


def line_of(dockerfile: Path, said: Sequence[str]) -> int:
    """The line of the instruction that a build was at when it ended, as far as its words tell; 0: they do not."""
    if found := next(filter(None, map(_START.match, said)), None):
        return int(found[1])
    at = next((found[1] for line in reversed(said) if (found := _STEP.match(line))), "")
    words = " ".join(at.split())
    for number, line in enumerate(dockerfile.read_text(errors="replace").splitlines(), 1):
        given = " ".join(line.rstrip("\\").split())
        if given and words.lower().startswith(given.lower()):
            return number
    return 0


async def _run(command: Sequence[str], what: str, say: Say, dockerfile: Path | None = None) -> None:
    last: deque[str] = deque(maxlen=_SHOWN)
    steps: deque[str] = deque(maxlen=1)
    async with await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            rest = ""
            async for text in TextReceiveStream(process.stdout, errors="replace"):
                *lines, rest = (rest + text).split("\n")
                rest = rest[-_LONGEST:]
                for line in filter(None, (each.strip().rpartition("\r")[2] for each in lines)):
                    last.append(line[:_LONGEST])
                    if _STEP.match(line):
                        steps.append(line)
                    say(line)
            code = await process.wait()
        finally:
            await _end(process)
    if code:
        shown = "\n".join([*last, rest]).strip()
        if dockerfile and (number := line_of(dockerfile, [*steps, *last])):
            what = what.replace(str(dockerfile), f"{dockerfile}:{number}", 1)
        raise SandboxError(f"{what} ({' '.join(command[:2])} ended with {code}):\n{shown}")


async def _end(process: Process) -> None:
    """End what was started, and what its RUN commands left running: gently first, so that nothing stays mounted."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            with anyio.move_on_after(_STOP_S):
                await process.wait()
        _signal(process, signal.SIGKILL)


def _signal(process: Process, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
