"""Every refusal in one shape: `{error, error_code, argument}`. Values that callers sent are not repeated."""

from __future__ import annotations

import logging
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rollcage import errors
from rollcage.schema.errors import NoSuchEnvironment, NotAllowed, Stopping, Unauthorized
from rollcage.schema.fingerprint import Conflict
from rollcage.schema.groups import GroupRequest
from rollcage.schema.request import bad_details
from rollcage.schema.views import Problem

log = logging.getLogger("rollcage.server")

CODES: tuple[tuple[type[Exception], int, str], ...] = (
    (Unauthorized, 401, "unauthorized"),
    (errors.UnknownGroup, 404, "unknown_group"),
    (errors.UnknownBatch, 404, "unknown_batch"),
    (errors.UnknownRollout, 404, "unknown_rollout"),
    (NoSuchEnvironment, 404, "unknown_environment"),
    (Conflict, 409, "conflict"),
    (NotAllowed, 403, "not_allowed"),
    (errors.UsageError, 422, "bad_argument"),
    (errors.QueueFull, 429, "queue_full"),
    (Stopping, 503, "stopping"),
    (errors.SetupError, 503, "machine_not_ready"),
    (errors.LogDamaged, 503, "log_damaged"),
    (errors.StoreError, 503, "store"),
    (errors.EnvironmentFailed, 502, "environment_failed"),
    (errors.RollcageError, 500, "error"),
)

WORDS = {
    404: ("not_found", "there is nothing at this address; /docs says what there is"),
    405: ("method_not_allowed", "this address does not take that method; /docs says which it takes"),
    413: ("too_large", "the request's body is too large for this server"),
}

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": about}
    for status, about in (
        (400, "The request could not be read."),
        (401, "No key, or not one of this server's."),
        (403, "Asked by a web page of another site, or under another name than this server's."),
        (404, "No such rollout, or not one that this key may see."),
        (406, "Nothing that the request accepts can be had."),
        (409, "The idempotency key names a rollout that was started with other arguments; `argument` names one."),
        (413, "The body is too large."),
        (422, "An argument makes no sense; `argument` names it."),
        (429, "As many rollouts wait as may; `Retry-After` says when to ask again."),
        (502, "A remote environment cannot be had, or does not answer."),
        (503, "The server stops, or its log cannot be read."),
    )
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says about these refusals."""
    return {status: RESPONSES[status] for status in (400, 401, 403, *statuses)}


def refusal(status: int, code: str, message: str, **more: Any) -> Response:
    """The answer to a request that is refused."""
    argument, headers = more.get("argument"), more.get("headers")
    problem = Problem(error=message, error_code=code, argument=argument or None)
    return Response(
        problem.model_dump_json(), status_code=status, media_type="application/json", headers=headers or None
    )


def answer_to(error: Exception) -> Response:
    """The refusal that tells of this error."""
    for kind, status, code in CODES:
        if isinstance(error, kind):
            headers = {}
            if isinstance(error, errors.QueueFull):
                headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
            if status == 401:
                headers["WWW-Authenticate"] = "Bearer"
            argument = error.argument if isinstance(error, errors.RollcageError) else None
            return refusal(status, code, str(error), argument=argument, headers=headers)
    return refusal(500, "internal_error", "a fault of the server's own; its log has the details")


def _methods(request: Request) -> list[str]:
    """What an address takes: each of its methods is a route of its own, and the router names only the first."""
    paths: dict[str, Any] = request.app.openapi()["paths"]
    found: set[str] = set()
    for template, operations in paths.items():
        if re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", template), request.url.path):
            found |= {method.upper() for method in operations}
    return sorted(found)


def install(app: FastAPI) -> None:
    """Make an app answer every error in this shape."""

    async def ours(request: Request, error: Exception) -> Response:
        return answer_to(error)

    async def invalid(request: Request, error: Exception) -> Response:
        details = error.errors() if isinstance(error, RequestValidationError) else []
        first = details[0] if details else {"type": "", "loc": (), "msg": "the request makes no sense"}
        if first["type"] == "json_invalid":
            return refusal(400, "bad_json", "the body is not JSON")
        where = tuple(first["loc"])
        if where == ("body",) and first["type"] != "value_error":
            return refusal(
                422,
                "bad_argument",
                "the body must be a JSON object with the arguments of a rollout, "
                "sent as content-type: application/json",
            )
        known = list(GroupRequest.model_fields) if where[:1] == ("body",) else []
        return answer_to(bad_details({**first, "loc": where[1:]}, known))

    async def plain(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        code, message = WORDS.get(status, ("refused", "the request was refused"))
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        if status == 405:
            headers["Allow"] = ", ".join(_methods(request))
        return refusal(status, code, message, headers=headers)

    async def unforeseen(request: Request, error: Exception) -> Response:
        return answer_to(error)

    app.add_exception_handler(errors.RollcageError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(Exception, unforeseen)
