"""Every error of the HTTP layer becomes a problem document; the table of statuses is `transfer/problems.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weightwire.transfer.errors import NotFoundError, RequestError, TransferError, VersionSkewError
from weightwire.transfer.problems import MEDIA_TYPE, problem_of, status_for

# Facts of a validation error that a client can use; one wrong request must not make an endless answer.
_MAX_FIELDS = 20


def problem_response(
    error: TransferError, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer for an error.

    Args:
        status: What HTTP itself asks for (405), where that is not the error's own status.
    """
    status = status or status_for(error)
    problem = {**problem_of(error), "status": status, "title": HTTPStatus(status).phrase}
    own = dict(headers or {})
    if status == HTTPStatus.UNAUTHORIZED:
        own["WWW-Authenticate"] = 'Bearer realm="weightwire"'
    if isinstance(error, VersionSkewError):
        own["Upgrade"] = f"weightwire/{error.facts.get('supported', '')}"
    return Response(json.dumps(problem), status_code=status, headers=own, media_type=MEDIA_TYPE)


def install_error_handlers(app: FastAPI, *, error_seen: Callable[[str], None]) -> None:
    """Answer our errors, FastAPI's and Starlette's in one form.

    Args:
        error_seen: Is told the code of each.
    """

    async def answer_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, TransferError)
        error_seen(error.code)
        return problem_response(error)

    async def answer_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await answer_ours(request, _validation_error(error))

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == HTTPStatus.NOT_FOUND:
            return await answer_ours(
                request, NotFoundError(f"path {request.url.path!r}: no such resource", kind="path")
            )
        refused = RequestError(f"{request.method} {request.url.path}: {error.detail}")
        error_seen(refused.code)
        # FastAPI's 400 is a body that is no JSON: for us a request like any other that cannot be right.
        status = None if error.status_code == HTTPStatus.BAD_REQUEST else error.status_code
        return problem_response(refused, status=status, headers=error.headers)

    app.add_exception_handler(TransferError, answer_ours)
    app.add_exception_handler(RequestValidationError, answer_validation)
    app.add_exception_handler(HTTPException, answer_http)


def _validation_error(error: RequestValidationError) -> RequestError:
    return request_error([(tuple(item["loc"]), str(item["msg"])) for item in error.errors()])


def request_error(fields: list[tuple[tuple[int | str, ...], str]]) -> RequestError:
    """The error for request fields that cannot be right: (path, message) each. Values are not quoted."""
    named = [{"field": ".".join(map(str, loc)), "message": message} for loc, message in fields[:_MAX_FIELDS]]
    words = "; ".join(f"{item['field']}: {item['message']}" for item in named)
    more = f" (and {len(fields) - _MAX_FIELDS} more)" if len(fields) > _MAX_FIELDS else ""
    return RequestError(f"request: {words}{more}", fields=named)
