"""The tools for batches: names, arguments, answers. No transport, as the rollout tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rollcage.evaluation.batches import BatchReport
from rollcage.schema.batches import BatchRequest
from rollcage.server.auth import Caller
from rollcage.types import Value

if TYPE_CHECKING:
    from rollcage.server.service import Service


class BatchName(Value):
    """Names one batch."""

    name: str = Field(max_length=200)
    """The name that `start_batch` was given, or gave."""


async def start(service: Service, request: BatchRequest, caller: Caller, progress: object) -> BatchReport:
    """Start a batch, or go on with it."""
    return (await service.batches.start(request, caller))[0]


async def look(service: Service, wanted: BatchName, caller: Caller, progress: object) -> BatchReport:
    """What it came to so far."""
    return await service.batches.report(wanted.name, caller)
