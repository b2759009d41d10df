"""The task that the harness primitive takes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class OpenCodeTask(BaseModel):
    """A piece of work. Judging it is the verifier's part."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    instruction: str
    """The prompt for the agent, handed over verbatim."""
    setup_shell: str | None = None
    """Bash that is run in the box before the agent; where it fails there is no session."""
    upload_files: dict[str, str] = Field(default_factory=dict)
    """`{path in the box: text}`, written before setup; a relative path is relative to the workdir."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Whatever the verifier wants to know; it is not looked at."""

    @classmethod
    def coerce(cls, value: Any) -> OpenCodeTask:
        """A task from a string (the instruction), a dict of its fields, or a task, which is given back as it is."""
        match value:
            case OpenCodeTask():
                return value
            case str():
                return cls(instruction=value)
            case dict():
                return cls.model_validate(value)
            case _:
                kind = type(value).__name__
                raise TypeError(f"task: Cannot coerce a {kind} to a task; give a string, a dict or an OpenCodeTask")
