"""What a process says to the service about its ranks, and when, against a service that a test plays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import pytest

from weightwire.service.client import reporter as reporter_module
from weightwire.service.client.api import RankBinding, ReportedFailure, ServiceClient
from weightwire.service.client.reporter import Reporter
from weightwire.transfer.control import Control
from weightwire.transfer.errors import CancelledError, NotFoundError, ServiceUnreachableError, TransferError
from weightwire.transfer.session import RankProgress, TransferState

PATIENCE_S = 30.0
BINDINGS = [RankBinding(instance_id="t", generation=1, rank=rank) for rank in (0, 1)]
READY = RankProgress(state=TransferState.READY, bytes_total=8, bytes_peer=8)
Sources = Sequence[tuple[str, int, int]]


def receiving(nbytes: int) -> RankProgress:
    return RankProgress(state=TransferState.RECEIVING, bytes_total=8, bytes_peer=nbytes)


class Service:
    """Takes reports, in place of a client; says what a test tells it to."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, RankProgress, Sources]] = []
        self.failures: list[tuple[int, str]] = []
        self.answer: TransferError | None = None
        self.refusal: TransferError | None = None
        self._told = threading.Condition()

    def report(
        self,
        transfer_id: str,
        binding: RankBinding,
        progress: RankProgress,
        *,
        sources: Sources = (),
        failures: Sequence[ReportedFailure] = (),
    ) -> TransferError | None:
        with self._told:
            self.reports.append((binding.rank, progress, sources))
            self.failures.extend((binding.rank, failure.code) for failure in failures)
            self._told.notify_all()
            refusal = self.refusal
        if refusal is not None:
            raise refusal
        return self.answer

    def wait_for(self, rank: int, progress: RankProgress, *, times: int = 1) -> None:
        with self._told:
            assert self._told.wait_for(
                lambda: sum(report[:2] == (rank, progress) for report in self.reports) >= times, PATIENCE_S
            )

    @property
    def ends(self) -> list[tuple[int, RankProgress, Sources]]:
        return [report for report in self.reports if report[1].state.is_final]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(reporter_module, "_INTERVAL_S", 0.005)
    return Service()


@pytest.fixture
def control() -> Control:
    return Control(deadline_s=PATIENCE_S)


def open_reporter(service: Service, control: Control) -> Reporter:
    return Reporter(cast(ServiceClient, service), "id", BINDINGS, control)


def test_every_rank_whose_figures_moved_is_reported(service: Service, control: Control) -> None:
    with open_reporter(service, control) as reporter:
        reporter.update(0, receiving(1))
        reporter.update(1, receiving(2))
        service.wait_for(0, receiving(1))
        service.wait_for(1, receiving(2))
        reporter.update(1, receiving(3))
        service.wait_for(1, receiving(3))


def test_rank_without_news_is_reported_again_so_that_an_end_is_heard(service: Service, control: Control) -> None:
    with open_reporter(service, control) as reporter:
        reporter.update(0, receiving(1))
        service.wait_for(0, receiving(1), times=3)
        service.answer = CancelledError("transfer: cancelled on request")
        with pytest.raises(CancelledError, match="on request"):
            control.pause(PATIENCE_S)


def failure(code: str) -> ReportedFailure:
    return ReportedFailure(instance_id="s", rank=0, generation=7, code=code, detail="x")


def test_source_that_was_given_up_is_reported_while_the_rank_goes_on_and_only_once(
    service: Service, control: Control
) -> None:
    with open_reporter(service, control) as reporter:
        reporter.update(1, receiving(1))
        service.wait_for(1, receiving(1))
        reporter.failed(1, failure("checksum_mismatch"))
        service.wait_for(1, receiving(1), times=2)
        reporter.failed(0, failure("source_leaving"))
        reporter.finish(0, READY, sources=[])
        reporter.finish(1, READY, sources=[])
    assert sorted(service.failures) == [(0, "source_leaving"), (1, "checksum_mismatch")]


def test_failure_that_could_not_be_told_is_told_when_the_service_is_back(service: Service, control: Control) -> None:
    service.refusal = ServiceUnreachableError("away", url="http://service")
    with open_reporter(service, control) as reporter:
        reporter.failed(0, failure("checksum_mismatch"))
        service.wait_for(0, RankProgress(), times=2)
        service.refusal = None
        service.failures.clear()
        reporter.finish(0, READY, sources=[])
        reporter.finish(1, READY, sources=[])
    assert set(service.failures) == {(0, "checksum_mismatch")}


def test_end_of_a_rank_is_reported_once_with_its_sources_and_at_once(service: Service, control: Control) -> None:
    with open_reporter(service, control) as reporter:
        # The figures say so a moment before `finish` does, and would go without the sources.
        reporter.update(0, READY)
        reporter.update(1, receiving(4))
        service.wait_for(1, receiving(4))
        reporter.finish(0, READY, sources=[("s", 3, 8)])
        service.wait_for(0, READY)
        assert reporter.unfinished == [1]
        reporter.finish(1, READY, sources=[])
    assert service.ends == [(0, READY, [("s", 3, 8)]), (1, READY, [])]


def test_end_that_cannot_be_reported_is_tried_until_the_service_is_back(service: Service, control: Control) -> None:
    service.refusal = ServiceUnreachableError("away", url="http://service")

    def come_back() -> None:
        service.wait_for(0, READY, times=3)
        service.refusal = None

    back = threading.Thread(target=come_back)
    back.start()
    with open_reporter(service, control) as reporter:
        reporter.finish(0, READY, sources=[])
        reporter.finish(1, READY, sources=[])
    back.join()
    assert service.ends[-2:] == [(0, READY, []), (1, READY, [])]


def test_end_is_given_up_when_the_service_stays_away(
    service: Service, control: Control, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporter_module, "_LAST_REPORTS_S", 0.02)
    service.refusal = ServiceUnreachableError("away", url="http://service")
    with open_reporter(service, control) as reporter:
        reporter.finish(0, READY, sources=[])
    assert "could not be reported" in caplog.text


def test_transfer_that_the_service_forgot_goes_on_unreported(service: Service, control: Control) -> None:
    service.refusal = NotFoundError("transfer 'id': not known", kind="transfer")
    with open_reporter(service, control) as reporter:
        reporter.update(0, receiving(1))
        service.wait_for(0, receiving(1))
        reporter.finish(0, READY, sources=[])
        service.wait_for(0, READY)
    control.check()
    assert sum(report[1] == receiving(1) for report in service.reports) == 1


def test_sources_are_told_of_along_with_the_progress(service: Service, control: Control) -> None:
    with open_reporter(service, control) as reporter:
        reporter.update(0, receiving(1))
        service.wait_for(0, receiving(1))
        reporter.update_sources(0, [("s", 0, 1)])
        service.wait_for(0, receiving(1), times=2)
        reporter.finish(0, READY, sources=[])
        reporter.finish(1, READY, sources=[])
    assert (0, receiving(1), [("s", 0, 1)]) in service.reports
