"""Makes an image from a Dockerfile, with whichever of buildah, podman and docker is here: we have no builder.

What RUN does is done by that builder, with its rights and its network: build only what you would run yourself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio.streams.text import TextReceiveStream

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.sandboxes.images.build import Built, LayeredProvider, Say
from rollcage.sandboxes.images.catalog import check_name
from rollcage.sandboxes.images.imports import ImageSource, import_image

TIMEOUT_S = 600.0
"""How long a build may take unless somebody says otherwise."""
_SHOWN = 12
"""Lines of a build that failed."""
_STEP = re.compile(r"STEP \d+/\d+ ?: (.*)", re.IGNORECASE)
"""How builders name the instruction they are at."""


class ImageBuilder(NamedTuple):
    """A builder: its commands, to which its own path is added in front."""

    name: str
    build: Sequence[str]
    """Followed by `-t TAG -f DOCKERFILE CONTEXT`."""
    save: Callable[[str, str], Sequence[str]]
    """From a tag and the path of an archive to be written."""


def _push(tag: str, to: str) -> Sequence[str]:
    return ("push", "--disable-compression", tag, f"oci-archive:{to}")  # what is unpacked at once need not be packed


TOOLS = (
    # chroot: in a container, where most of us are, there is no right to do more.
    ImageBuilder("buildah", ("bud", "--isolation", "chroot", "--layers"), _push),
    ImageBuilder("podman", ("build", "--layers"), lambda tag, to: ("save", "--format", "oci-archive", "-o", to, tag)),
    ImageBuilder("docker", ("build",), lambda tag, to: ("save", "-o", to, tag)),
)


def builder() -> ImageBuilder | None:
    """The first that is installed."""
    return next((tool for tool in TOOLS if shutil.which(tool.name)), None)


async def build_dockerfile(
    provider: LayeredProvider,
    name: str,
    context: Path,
    say: Say,
    *,
    timeout_s: float = TIMEOUT_S,
    rebuild: bool = False,
) -> Built:
    """The image of that name, built from a folder with a Dockerfile unless it is there already.

    SandboxError, with the last lines of the build, where it fails or takes too long; nothing is left behind then.
    """
    check_name(name)
    if not (context / "Dockerfile").is_file():
        raise UsageError(f"{context}: there is no Dockerfile in it")
    if provider.images.has(name) and not rebuild:
        return Built(provider.images.get(name), False)
    tool = builder()
    if tool is None:
        tried = ", ".join(each.name for each in TOOLS)
        raise SetupError(
            f"no builder of images is installed (looked for {tried}); install one: apt-get install buildah"
        )
    # A tag of ours: whatever else is called so on this machine stays as it is.
    tag = f"localhost/rollcage/{name.lower()}"
    with provider.images.build_folder() as aside:
        archive, file = aside / "image.tar", str(context / "Dockerfile")
        try:
            with anyio.fail_after(timeout_s):
                say(f"{tool.name} builds {context}")
                command = [tool.name, *tool.build, "-t", tag, "-f", file, str(context)]
                await _run(command, f"{file}: cannot be built", say, Path(file))
                await _run([tool.name, *tool.save(tag, str(archive))], f"{tag}: cannot be saved", say)
        except TimeoutError:
            raise SandboxError(f"{file}: {tool.name} had not built it after {timeout_s:g} s") from None
        return await import_image(provider, name, ImageSource(path=archive), say, rebuild=rebuild)


def line_of(dockerfile: Path, said: Sequence[str]) -> int:
    """The line of the instruction that a build was at when it ended, as far as its words tell; 0: they do not."""
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
                for line in filter(str.strip, lines):
                    last.append(line)
                    if _STEP.match(line):
                        steps.append(line)
                    say(line)
            code = await process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if code:
        shown = "\n".join([*last, rest]).strip()
        if dockerfile and (number := line_of(dockerfile, steps)):
            what = what.replace(str(dockerfile), f"{dockerfile}:{number}", 1)
        raise SandboxError(f"{what} ({' '.join(command[:2])} ended with {code}):\n{shown}")
