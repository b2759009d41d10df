"""The images of tasks' folders: what `rollcage image build FOLDER` builds, and `--build` where they are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollcage.errors import SandboxError, UsageError

if TYPE_CHECKING:
    from rollcage.sandboxes.images.build import Built, Say
    from rollcage.sandboxes.local.provider import LocalProvider
    from rollcage.settings import Settings
    from rollcage.tasks import TaskFile
    from rollcage.tasks.harbor_images import ImagePlan


async def build_images(
    boxes: LocalProvider, file: TaskFile, say: Say, *, rebuild: bool = False, timeout_s: float | None = None
) -> list[Built]:
    """The images of all Dockerfiles that a task's folder has boxes of, each named by its content."""
    from rollcage.sandboxes.images.dockerfile import TIMEOUT_S, build_dockerfile

    return [
        await build_dockerfile(
            boxes,
            plan.name,
            plan.context,
            say,
            warm=plan.warm,
            rebuild=rebuild,
            timeout_s=timeout_s or plan.timeout_s or TIMEOUT_S,
        )
        for plan in plans(file)
    ]


def plans(file: TaskFile) -> list[ImagePlan]:
    """What is built from a task's folder: the images that its boxes name."""
    from rollcage.tasks.harbor import is_folder_task
    from rollcage.tasks.harbor_images import plans_of

    if not is_folder_task(file.path):
        return []
    wanted = {file.sandbox.template, *(box.template for box in file.task.verifier_boxes)}
    return [plan for plan in plans_of(file.path) if plan.name in wanted]


async def build_missing(settings: Settings, files: Sequence[TaskFile]) -> None:
    """`--build`: the images that tasks want and that are not there, and can be built from their folders.

    Of several, one that cannot be built is told, and keeps no other from running.
    """
    from rollcage.wiring import provider, say

    async with provider(settings) as boxes:
        for file in files:
            try:
                await build_images(boxes, file, say)
            except (SandboxError, UsageError) as error:
                if len(files) == 1:
                    raise
                say(f"{file.path}: {error}")
