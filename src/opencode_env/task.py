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
        """A task from a string (the instruction), a dict of its fields, or a list of chat messages, as trainers hand
        on a dataset's prompt: its last user message is the instruction. A task is given back as it is.
        """
        match value:
            case OpenCodeTask():
                return value
            case str():
                return cls(instruction=value)
            case dict():
                return cls.model_validate(value)
            case list() if text := _last_user_text(value):
                return cls(instruction=text)
            case list():
                raise TypeError(
                    "task: Cannot coerce these messages to a task; none of them is a user's with text in it"
                )
            case _:
                kind = type(value).__name__
                raise TypeError(
                    f"task: Cannot coerce a {kind} to a task; give a string, a dict, messages or an OpenCodeTask"
                )


def _last_user_text(messages: list[Any]) -> str:
    """What the user said last; empty where nothing."""
    for message in reversed(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return _text_of(message.get("content"))
    return ""


def _text_of(content: Any) -> str:
    """The text of a message, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
