"""Tasks: where `Task` values come from."""

from rollcage.tasks.files import TaskFile, load, load_task
from rollcage.tasks.sources import SourcedTask, TaskSource, open_source

__all__ = ["SourcedTask", "TaskFile", "TaskSource", "load", "load_task", "open_source"]
