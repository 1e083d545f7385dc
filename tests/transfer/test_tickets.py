"""Tickets: only what the service signed, for as long as it said; anything else is a TicketError."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
from dataclasses import asdict, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weightwire.transfer.errors import TicketError
from weightwire.transfer.tickets import Ticket, claimed_rank, derive_source_key, issue_ticket, read_ticket

KEY = derive_source_key(b"master", instance_id="s", rank=1, generation=7)
NOW = 1_800_000_000.0
TICKET = Ticket(
    transfer_id="t-1",
    source_instance="s",
    source_rank=1,
    source_generation=7,
    target_instance="ü/\ud800",
    target_rank=3,
    weight_version=2,
    expires_at=NOW + 60,
)
TEXT = issue_ticket(KEY, TICKET)


def signed(claims: object) -> str:
    """A ticket with the right signature over whatever claims."""
    raw = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    text = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
    signature = hmac.new(KEY, text.encode(), hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def test_ticket_says_what_was_granted() -> None:
    assert read_ticket(KEY, TEXT, now=NOW) == TICKET


def test_ticket_is_text_that_fits_a_header() -> None:
    assert TEXT.isascii()
    assert set(TEXT) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


def test_helper_of_these_tests_signs_as_the_service_does() -> None:
    assert read_ticket(KEY, signed(asdict(TICKET)), now=NOW) == TICKET


@pytest.mark.parametrize("now", [NOW + 60, NOW + 61, float("inf")])
def test_ticket_is_over_at_its_end(now: float) -> None:
    with pytest.raises(TicketError, match=r"'t-1': expired"):
        read_ticket(KEY, TEXT, now=now)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"instance_id": "x", "rank": 1, "generation": 7}, id="another instance"),
        pytest.param({"instance_id": "s", "rank": 2, "generation": 7}, id="another rank"),
        pytest.param({"instance_id": "s", "rank": 1, "generation": 8}, id="the same rank, restarted"),
        pytest.param({"instance_id": "s1", "rank": 17, "generation": 7}, id="fields that run together"),
    ],
)
def test_ticket_for_one_source_process_does_not_open(other: dict[str, str | int]) -> None:
    key = derive_source_key(b"master", **other)  # type: ignore[arg-type]
    with pytest.raises(TicketError, match="another key"):
        read_ticket(key, TEXT, now=NOW)


def test_ticket_of_another_service_does_not_open() -> None:
    key = derive_source_key(b"other", instance_id="s", rank=1, generation=7)
    with pytest.raises(TicketError, match="another key"):
        read_ticket(key, TEXT, now=NOW)


def test_keys_of_names_that_json_could_confuse_differ() -> None:
    names = ["a", 'a",1,1]', "", "ü", "\ud800", "\\ud800", "\x00"]
    keys = {derive_source_key(b"m", instance_id=name, rank=1, generation=1) for name in names}
    assert len(keys) == len(names)
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize("field", sorted(asdict(TICKET)))
def test_claim_that_was_changed_is_noticed(field: str) -> None:
    claims = asdict(TICKET)
    claims[field] = claims[field] + 1 if isinstance(claims[field], (int, float)) else claims[field] + "x"
    forged = base64.urlsafe_b64encode(json.dumps(claims, sort_keys=True, separators=(",", ":")).encode()).rstrip(b"=")
    with pytest.raises(TicketError, match="another key, or changed"):
        read_ticket(KEY, f"{forged.decode()}.{TEXT.partition('.')[2]}", now=NOW)
    reissued = issue_ticket(KEY, replace(TICKET, **{field: claims[field]}))
    assert reissued != TEXT


@given(st.integers(0, len(TEXT) - 1), st.sampled_from("AZaz09-_.= \n"))
def test_text_with_one_character_changed_is_refused_or_says_the_same(at: int, character: str) -> None:
    """The last character of a base64 text has bits that do not count."""
    text = TEXT[:at] + character + TEXT[at + 1 :]
    try:
        assert read_ticket(KEY, text, now=NOW) == TICKET
    except TicketError:
        assert text != TEXT


@given(st.integers(0, len(TEXT) - 1))
def test_text_that_is_cut_is_refused(end: int) -> None:
    with pytest.raises(TicketError):
        read_ticket(KEY, TEXT[:end], now=NOW)


@given(st.text(st.characters(), max_size=40) | st.text("AZaz09-_.=", max_size=40))
@example("")
@example(".")
@example("..")
@example("=.=")
@example("\ud800.\udfff")
@example("ü.ü")
@example("a" * 1_000_000)
@example("." * 100_000)
@example(TEXT + "=")
@example(TEXT + ".")
@example(TEXT + "\u0660")
@example(TEXT.replace(".", "=."))
@example(TEXT.replace(".", "\n."))
def test_arbitrary_text_is_a_ticket_error(text: str) -> None:
    found = (
        contextlib.nullcontext(TICKET) if text in (TEXT, TEXT + "=") else pytest.raises(TicketError, match=r"^.{,200}$")
    )
    with found:
        assert read_ticket(KEY, text, now=NOW) == TICKET


WRONG_CLAIMS: list[object] = [
    *([], {}, None, 1, "x"),
    *(b"", b"\xff", b"{", b"[" * 100_000, [asdict(TICKET)]),
    asdict(TICKET) | {"more": 1},
    {name: value for name, value in asdict(TICKET).items() if name != "target_rank"},
    *(asdict(TICKET) | {"expires_at": value} for value in ("x", None, [0], {"x": 0}, float("nan"))),
]


@pytest.mark.parametrize("claims", WRONG_CLAIMS, ids=lambda claims: repr(claims)[:40])
def test_signed_claims_that_are_no_ticket_are_refused(claims: object) -> None:
    with pytest.raises(TicketError):
        read_ticket(KEY, signed(claims), now=NOW)


def test_message_never_quotes_the_ticket() -> None:
    with pytest.raises(TicketError) as caught:
        read_ticket(b"other", TEXT, now=NOW)
    assert TEXT[:20] not in str(caught.value)


@pytest.mark.parametrize(
    "claims",
    [[], None, 1, "x", {}, {"source_rank": None}, {"source_rank": True}, {"source_rank": "1"}, {"source_rank": 1.0},
     b"{", b"[" * 100_000, b'{"source_rank": ' + b"1" * 5000 + b"}", b"\xff"],
)  # fmt: skip
def test_claims_without_a_rank_choose_no_key(claims: object) -> None:
    assert claimed_rank(signed(claims)) is None


def test_claimed_rank_is_that_of_the_ticket_whoever_signed_it() -> None:
    assert claimed_rank(TEXT) == TICKET.source_rank
    assert claimed_rank(signed({"source_rank": -3})) == -3
    assert claimed_rank(TEXT.partition(".")[0] + ".nonsense") == TICKET.source_rank
