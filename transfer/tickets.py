"""Tickets: what lets one target rank read from one source rank.

The service signs a ticket with a key that it derives for each source process, and gives that key to the process
when it registers. So a source checks tickets without asking anybody, a transfer outlives an outage of the
service, and a restarted source, which has a new generation and so a new key, accepts none of the old ones.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import asdict, dataclass

from weightwire.transfer.errors import TicketError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a ticket says. `expires_at` is in seconds since 1970."""

    transfer_id: str
    source_instance: str
    source_rank: int
    source_generation: int
    target_instance: str
    target_rank: int
    weight_version: int
    expires_at: float


def derive_source_key(master_key: bytes, *, instance_id: str, rank: int, generation: int) -> bytes:
    """The 32-byte key of one source process."""
    text = json.dumps([instance_id, rank, generation])
    return hmac.new(master_key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()


def issue_ticket(source_key: bytes, ticket: Ticket) -> str:
    """The ticket as text: claims and their HMAC-SHA-256, base64url, joined by a dot."""
    claims = _encode(json.dumps(asdict(ticket), sort_keys=True, separators=(",", ":")).encode())
    return f"{claims}.{_encode(hmac.new(source_key, claims.encode(), hashlib.sha256).digest())}"


def read_ticket(source_key: bytes, text: str, *, now: float) -> Ticket:
    """Check a ticket's signature and expiry.

    Raises:
        TicketError: If it is not a ticket, was signed with another key, or expired before `now`.
    """
    claims, _, signature = text.partition(".")
    expected = hmac.new(source_key, claims.encode("utf-8", "surrogatepass"), hashlib.sha256).digest()
    try:
        if not hmac.compare_digest(_decode(signature), expected):
            raise TicketError("ticket: signed with another key, or changed; expected one granted for this source")
        ticket = Ticket(**json.loads(_decode(claims)))
        # Not `<=`: a time that is no number is over.
        expired = not ticket.expires_at > now
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise TicketError("ticket: not in the form that the service grants") from error
    if expired:
        raise TicketError(f"ticket of transfer {ticket.transfer_id!r}: expired {now - ticket.expires_at:.0f} s ago")
    return ticket


def claimed_rank(text: str) -> int | None:
    """The source rank that a ticket speaks of, unverified: good for choosing the key that it is checked with.

    Returns:
        None if the text is no ticket.
    """
    try:
        claims = json.loads(_decode(text.partition(".")[0]))
    except (ValueError, RecursionError):
        return None
    rank = claims.get("source_rank") if isinstance(claims, dict) else None
    # `type() is`, since a JSON true would pass for an int.
    return rank if type(rank) is int else None


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    raw = text.encode("ascii")
    return base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True)
