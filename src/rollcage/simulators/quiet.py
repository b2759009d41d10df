"""A protocol for uvicorn that logs no requests."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class QuietProtocol(HttpToolsProtocol):
    """Logs no requests. Config's own switch for that would silence every other uvicorn in the process too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False
