"""Errors as RFC 9457 problem documents, and back; one table decides HTTP statuses.

Both HTTP servers, the control plane and a source's data plane, answer from this table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import cast

from weightwire.transfer import errors
from weightwire.transfer.errors import Fact, SourceRefusedError, TransferError

MEDIA_TYPE = "application/problem+json"

# First match wins, so narrow classes stand above the wide ones.
STATUSES: tuple[tuple[type[TransferError], int], ...] = (
    (errors.ForbiddenError, 403),
    (errors.TicketError, 403),
    (errors.AccessError, 401),
    (errors.TooLargeError, 413),
    (errors.VersionSkewError, 426),
    (errors.RegionError, 422),
    (errors.RequestError, 422),
    (errors.NotFoundError, 404),
    (errors.ConflictError, 409),
    (errors.FencedError, 409),
    (errors.SourceBusyError, 503),
    (errors.SourceLeavingError, 503),
    (errors.SourceError, 502),
    (errors.ManifestError, 422),
    (errors.DtypeError, 422),
    (errors.LoadError, 422),
    (errors.IntegrityError, 422),
    (errors.AdmissionError, 507),
    (errors.DeadlineError, 504),
    (errors.CancelledError, 409),
    (errors.ServiceUnreachableError, 502),
    (errors.TransferError, 500),
)
_RESERVED = frozenset({"type", "title", "status", "detail", "code", "instance"})
# A checkpoint of a wrong model has a hundred thousand names without a place; the first ones say it all.
MOST_LISTED = 100


def status_for(error: TransferError) -> int:
    return next(status for kind, status in STATUSES if isinstance(error, kind))


def listed_facts(error: TransferError) -> dict[str, Fact]:
    """The facts of an error as they are printed and sent: of a long list the first `MOST_LISTED` members.

    Beside such a list named `x` is its full length, as `x_total`. The error itself keeps all.
    """
    facts = dict[str, Fact]()
    for key, value in error.facts.items():
        if isinstance(value, list) and len(value) > MOST_LISTED:
            facts |= {key: cast(Fact, value[:MOST_LISTED]), f"{key}_total": len(value)}
        else:
            facts[key] = value
    return facts


def problem_of(error: TransferError, *, status: int | None = None) -> dict[str, object]:
    """The problem document: `type, title, status, detail, code`, and `listed_facts` as members."""
    status = status or status_for(error)
    return {
        **{key: value for key, value in listed_facts(error).items() if key not in _RESERVED},
        "type": f"urn:weightwire:error:{error.code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": str(error),
        "code": error.code,
    }


def problem_text(error: TransferError, *, status: int | None = None) -> bytes:
    return json.dumps(problem_of(error, status=status)).encode()


def error_of(problem: Mapping[str, object]) -> TransferError:
    """The error that a problem document tells of, with the class of its `code`.

    A code that this version does not know becomes a plain `TransferError`.
    """
    detail = str(problem.get("detail") or problem.get("title") or "no detail given")
    kinds = {kind.code: kind for kind in _all_errors(TransferError)}
    kind = kinds.get(str(problem.get("code")), TransferError)
    return _with_facts(kind(detail), problem)


def refusal_of(*, status: int, body: bytes, content_type: str, url: str) -> TransferError:
    """The error behind an HTTP answer that is not a success.

    A problem document of ours keeps its class. Anything else, such as a proxy's or a login page, becomes a
    `SourceRefusedError` that names status and URL and quotes nothing of the page.
    """
    if content_type.partition(";")[0].strip().lower() == MEDIA_TYPE:
        try:
            problem = json.loads(body)
        except (ValueError, RecursionError):
            problem = None
        if isinstance(problem, dict) and "code" in problem:
            return error_of(problem)
    return SourceRefusedError(
        f"{url}: answered {status} with {content_type or 'no content type'}, expected an answer of weightwire",
        status=status,
        url=url,
    )


def _all_errors(root: type[TransferError]) -> list[type[TransferError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _all_errors(child))]


def _with_facts(error: TransferError, problem: Mapping[str, object]) -> TransferError:
    # A document comes from JSON, so its members are of the types that facts have.
    error.facts = cast(Mapping[str, Fact], {k: v for k, v in problem.items() if k not in _RESERVED})
    return error
