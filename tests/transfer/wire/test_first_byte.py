"""Answers that begin late, because something on the way takes them whole, are not those of a dead source."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import pytest

from tests.transfer.conftest import PATIENCE_S, endpoint_of
from tests.transfer.wire.conftest import Answer, Answering, Model
from weightwire.transfer.control import Control
from weightwire.transfer.planning import plan_pull
from weightwire.transfer.wire.puller import Puller, PullOptions
from weightwire.transfer.wire.stream import Timeouts
from weightwire.transfer.wire.watchdog import Meter, Reading, Watchdog

WINDOW_S = 1.0


def asked(received: int, *, unanswered: bool) -> dict[Hashable, Reading]:
    return {"s": Reading(asking=True, received=received, waits=0, unanswered=unanswered)}


def looks(dog: Watchdog, begin: float, end: float, readings: dict[Hashable, Reading]) -> float:
    """Look each quarter of a second; returns for how long the source has been slow at the end."""
    for step in range(round((end - begin) * 4)):
        dog.observe(begin + step / 4, readings)
    dog.observe(end, readings)
    return dog.slow_s("s", end)


def test_answer_may_begin_as_late_as_is_allowed_and_not_later() -> None:
    dog = Watchdog(min_rate=100, window_s=WINDOW_S, first_byte_s=5)
    assert looks(dog, 0, 5.5, asked(0, unanswered=True)) == 0
    assert looks(dog, 5.75, 6, asked(0, unanswered=True)) > 0


def test_answer_that_has_begun_has_a_window_of_its_own() -> None:
    dog = Watchdog(min_rate=100, window_s=WINDOW_S, first_byte_s=5)
    assert looks(dog, 0, 4, asked(0, unanswered=True)) == 0
    assert looks(dog, 4.25, 4.75, asked(10, unanswered=False)) == 0
    assert looks(dog, 5, 5.25, asked(10, unanswered=False)) > 0


def test_answer_has_no_more_time_to_begin_by_default() -> None:
    dog = Watchdog(min_rate=100, window_s=WINDOW_S)
    assert looks(dog, 0, 1, asked(0, unanswered=True)) == 1


def test_reading_is_unanswered_while_no_answer_has_begun() -> None:
    connecting, waiting, reading, idle = Meter(), Meter(), Meter(), Meter()
    for meter in (connecting, waiting, reading):
        meter.asking = True
    waiting.received = waiting.asked_with = 7
    reading.received, reading.asked_with = 9, 7
    assert Reading.of(waiting, idle).unanswered
    assert not Reading.of(waiting, reading).unanswered
    assert not Reading.of(connecting).unanswered


@pytest.mark.parametrize(
    ("first_byte_s", "codes"),
    [
        pytest.param(PATIENCE_S, [], id="allowed"),
        pytest.param(0.0, ["source_stalled"], id="not allowed"),
    ],
)
def test_pull_waits_for_a_server_that_takes_answers_whole(
    answering: Answering, model: Model, first_byte_s: float, codes: list[str]
) -> None:
    never = threading.Event()

    def late(answer: Answer) -> bytes:
        # As long as it takes a slow server to read the answer itself; several times what a source has.
        never.wait(1.0)
        return answer.text()

    server = answering(late)
    target = model.target()
    plan = plan_pull(target.manifest, [model.manifest])
    timeouts = Timeouts(connect_s=PATIENCE_S, stall_s=0.2, first_byte_s=first_byte_s)
    options = PullOptions(streams=1, timeouts=timeouts, stall_window_s=0.2)
    endpoint = endpoint_of(model.manifest, url=server.url)
    with Puller(target, [endpoint], {model.manifest.digest: model.manifest}, options) as puller:
        puller.pull(plan, Control(deadline_s=PATIENCE_S))
    assert [failure.code for failure in puller.failures] == codes
