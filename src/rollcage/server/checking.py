"""Everything that is wrong with the arguments of a rollout, for a form that shows it all at once."""

from __future__ import annotations

from pydantic import ValidationError

from rollcage.errors import UsageError
from rollcage.schema.request import RolloutRequest, bad_details
from rollcage.server.service import Service
from rollcage.types import JsonObject

STAND_IN = {"instruction": "x", "base_url": "http://127.0.0.1/v1", "model": "m", "api_key": "k"}
"""What is looked at in the place of an argument that is wrong and cannot be left out: others may be wrong, too."""


async def all_problems(service: Service, body: JsonObject) -> list[UsageError]:
    """One for each argument that is wrong; nothing is started."""
    found: dict[str, UsageError] = {}
    body = dict(body)
    while True:
        fresh = [problem for problem in await _problems(service, body) if problem.argument not in found]
        for problem in fresh:
            found.setdefault(problem.argument, problem)
            body.pop(problem.argument, None)
            if problem.argument in STAND_IN:
                body[problem.argument] = STAND_IN[problem.argument]
        if not fresh:
            return list(found.values())


async def _problems(service: Service, body: JsonObject) -> list[UsageError]:
    job = None
    try:
        job = (await service.understood(RolloutRequest.model_validate(body))).job
        service.runner.check(job)
    except ValidationError as error:
        known = list(RolloutRequest.model_fields)
        return [bad_details(each, known) for each in error.errors(include_url=False, include_input=False)]
    except UsageError as error:
        return [error]
    finally:
        service.forget_unused([job] if job else [])
    return []
