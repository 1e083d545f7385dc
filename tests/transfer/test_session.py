"""The state machine of a transfer, against a model of it and against every order of events."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightwire.transfer.errors import ConflictError
from weightwire.transfer.session import RankProgress, Session, TransferState

STATES = list(TransferState)
GROWING = [TransferState.PLANNED, TransferState.RECEIVING, TransferState.VERIFYING, TransferState.READY]
BYTES = st.integers(0, 100)


def report(state: TransferState, **facts: int | str) -> RankProgress:
    return replace(RankProgress(state=state), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", STATES)
def test_state_is_written_as_its_word_and_knows_whether_it_is_the_end(state: TransferState) -> None:
    assert str(state) == state.value
    assert state.is_final == (state in {"ready", "failed", "cancelled"})


@pytest.mark.parametrize("events", list(itertools.permutations(GROWING)), ids=lambda events: "-".join(events))
def test_rank_never_goes_back_in_whatever_order_its_reports_come(events: tuple[TransferState, ...]) -> None:
    progress, furthest = RankProgress(), TransferState.PLANNED
    for event in events:
        progress = progress.advance(report(event))
        furthest = max(furthest, event, key=GROWING.index)
        assert progress.state is furthest


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", STATES)
def test_rank_that_ended_stays_or_refuses_a_contradiction(state: TransferState, event: TransferState) -> None:
    progress = report(state, bytes_peer=5)
    if not state.is_final:
        after = progress.advance(report(event, bytes_peer=3))
        assert after.bytes_peer == 5
        assert after.state is (event if event not in GROWING else max(state, event, key=GROWING.index))
    elif event.is_final and event is not state:
        with pytest.raises(ConflictError, match=f"ended as {state}"):
            progress.advance(report(event))
    else:
        assert progress.advance(report(event, bytes_peer=9)) == progress


def test_bytes_only_grow_each_by_itself() -> None:
    progress = RankProgress().advance(report(TransferState.RECEIVING, bytes_total=10, bytes_peer=4, bytes_disk=1))
    progress = progress.advance(report(TransferState.RECEIVING, bytes_total=8, bytes_peer=2, bytes_disk=3))
    assert (progress.bytes_total, progress.bytes_peer, progress.bytes_disk) == (10, 4, 3)


def test_session_is_as_far_as_the_rank_that_is_furthest_behind() -> None:
    session = Session.of(3)
    assert session.state is TransferState.PLANNED
    for rank in range(3):
        session = session.rank_reported(rank, report(TransferState.VERIFYING))
        expected = TransferState.VERIFYING if rank == 2 else TransferState.PLANNED
        assert session.state is expected


def test_session_fails_with_its_first_rank_that_fails_and_says_why() -> None:
    session = Session.of(2).rank_reported(0, report(TransferState.READY))
    failed = report(TransferState.FAILED, error_code="integrity_failed", error_detail="tensor 'a'")
    session = session.rank_reported(1, failed)
    assert (session.state, session.error_code, session.error_detail) == ("failed", "integrity_failed", "tensor 'a'")
    assert session.rank_reported(0, report(TransferState.CANCELLED)) is session


def test_rank_that_was_on_its_way_shares_the_end_of_its_session() -> None:
    session = Session.of(2).rank_reported(0, report(TransferState.READY))
    session = session.rank_reported(1, report(TransferState.RECEIVING))
    assert [session.state_of(rank) for rank in range(2)] == [TransferState.READY, TransferState.RECEIVING]
    ended = session.cancelled("stopped")
    assert [ended.state_of(rank) for rank in range(2)] == [TransferState.READY, TransferState.CANCELLED]
    assert ended.ranks[1].state is TransferState.RECEIVING


def test_session_refuses_a_rank_that_it_does_not_have() -> None:
    with pytest.raises(ConflictError, match=r"rank 2: the transfer has ranks \[0, 1\]"):
        Session.of(2).rank_reported(2, report(TransferState.RECEIVING))


def test_session_refuses_a_rank_that_takes_its_end_back() -> None:
    session = Session.of(2).rank_reported(0, report(TransferState.READY))
    with pytest.raises(ConflictError, match="ended as ready"):
        session.rank_reported(0, report(TransferState.FAILED))


def test_event_leaves_the_former_session_as_it_was() -> None:
    before = Session.of(1)
    after = before.rank_reported(0, report(TransferState.RECEIVING))
    assert before == Session.of(1)
    assert after is not before


@pytest.mark.parametrize("end", [TransferState.READY, TransferState.FAILED, TransferState.CANCELLED])
def test_verdict_comes_too_late_for_a_session_that_ended(end: TransferState) -> None:
    session = Session.of(1).rank_reported(0, report(end))
    assert session.cancelled("x") is session
    assert session.expired("x") is session


class SessionMachine(RuleBasedStateMachine):
    """Any events in any order: the state only ever moves forward, and the end is the end."""

    @initialize(num_ranks=st.integers(1, 3))
    def open(self, num_ranks: int) -> None:
        self.session = Session.of(num_ranks)
        self.furthest = dict.fromkeys(range(num_ranks), TransferState.PLANNED)
        self.verdict: tuple[TransferState, str] | None = None

    @rule(rank=st.integers(-1, 3), state=st.sampled_from(STATES), peer=BYTES, disk=BYTES, total=BYTES)
    def report(self, rank: int, state: TransferState, peer: int, disk: int, total: int) -> None:
        before = self.session
        event = RankProgress(
            state=state, bytes_total=total, bytes_peer=peer, bytes_disk=disk, error_code=f"code-{rank}"
        )  # fmt: skip
        known = self.furthest.get(rank)
        contradiction = known is not None and known.is_final and state.is_final and state is not known
        if known is None or (contradiction and not before.state.is_final):
            with pytest.raises(ConflictError):
                before.rank_reported(rank, event)
            return
        self.session = before.rank_reported(rank, event)
        if before.state.is_final:
            assert self.session is before
            return
        if not known.is_final:
            self.furthest[rank] = max(known, state, key=GROWING.index) if state in GROWING else state
            if state in (TransferState.FAILED, TransferState.CANCELLED):
                self.verdict = (state, f"code-{rank}")

    @rule(expired=st.booleans())
    def decide(self, expired: bool) -> None:
        before = self.session
        self.session = before.expired("late") if expired else before.cancelled("stop")
        if before.state.is_final:
            assert self.session is before
        elif expired:
            self.verdict = (TransferState.FAILED, "deadline_exceeded")
        else:
            self.verdict = (TransferState.CANCELLED, "cancelled")

    @invariant()
    @precondition(lambda self: hasattr(self, "session"))
    def state_is_that_of_the_model(self) -> None:
        if self.verdict:
            assert (self.session.state, self.session.error_code) == self.verdict
        else:
            assert self.session.state is min(self.furthest.values(), key=GROWING.index)
            assert self.session.error_code is None
        for rank, state in self.furthest.items():
            assert self.session.ranks[rank].state is state


TestSession = SessionMachine.TestCase
