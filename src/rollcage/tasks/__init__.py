"""Tasks: where `Task` values come from."""

from rollcage.tasks.files import TaskFile, load, load_task

__all__ = ["TaskFile", "load", "load_task"]
