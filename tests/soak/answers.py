"""Faults of answers whose length nobody knows beforehand: their places are parts of it."""

from __future__ import annotations

import threading

from tests.faults.proxy import Exchange, Fault

_SLOW_PIECE_S = 0.01


def flipped_at(share: float) -> Fault:
    """One bit the wrong way round, so far into the body."""

    def fault(exchange: Exchange) -> bool:
        answer = exchange.ask()
        exchange.send(answer.head)
        at, sent = int(share * answer.length), 0
        for piece in answer.pieces():
            if 0 <= at - sent < len(piece):
                piece = bytes([*piece[: at - sent], piece[at - sent] ^ 1, *piece[at - sent + 1 :]])
            exchange.send_body(piece)
            sent += len(piece)
        return sent == answer.length

    return fault


def cut_at(share: float) -> Fault:
    """The connection ends so far into the body."""

    def fault(exchange: Exchange) -> bool:
        answer = exchange.ask()
        exchange.send(answer.head)
        exchange.send_body(answer.body.read(int(share * answer.length)))
        return False

    return fault


def slowed(exchange: Exchange) -> bool:
    """Some megabytes a second."""
    answer = exchange.ask()
    exchange.send(answer.head)
    for piece in answer.pieces():
        exchange.send_body(piece)
        threading.Event().wait(_SLOW_PIECE_S)
    return True
