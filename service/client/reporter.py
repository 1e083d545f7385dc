"""Tells the service how far the ranks of a process are, and hears from it when somebody ends the transfer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from weightwire.service.client.api import RankBinding, ReportedFailure, ServiceClient
from weightwire.transfer.control import Control
from weightwire.transfer.errors import NotFoundError, ServiceUnreachableError, TransferError
from weightwire.transfer.session import RankProgress

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.25
# How long the last reports are tried; the weights are in place by then, and nobody needs them to use them.
_LAST_REPORTS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a rank ended, and what it had from whom: as (instance, rank, bytes)."""

    progress: RankProgress
    sources: Sequence[tuple[str, int, int]]


class Reporter:
    """Reports the newest progress of each rank a few times a second, from one thread of its own.

    Bytes move whether or not the service can be reached: what cannot be reported now is reported later. Leaving the
    context tries for a while to report how the ranks ended.
    """

    def __init__(
        self, client: ServiceClient, transfer_id: str, bindings: Sequence[RankBinding], control: Control
    ) -> None:
        """Args:
        bindings: Of the ranks that this process reports for.
        control: Is stopped if the service says that the transfer has ended.
        """
        self._client = client
        self._transfer_id = transfer_id
        self._bindings = {binding.rank: binding for binding in bindings}
        self._control = control
        self._newest = {rank: RankProgress() for rank in self._bindings}
        self._sources: dict[int, Sequence[tuple[str, int, int]]] = dict.fromkeys(self._bindings, ())
        self._told: dict[int, tuple[RankProgress, Sequence[tuple[str, int, int]]]] = {}
        self._ends: dict[int, _End] = {}
        self._ended_ranks: set[int] = set()
        self._failures: dict[int, list[ReportedFailure]] = {rank: [] for rank in self._bindings}
        # Nothing more is to be heard about how far it is: the service ended it, or does not know it any more.
        self._is_over = False
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="weightwire-report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._wake.set()
        self._thread.join()

    def update(self, rank: int, progress: RankProgress) -> None:
        """Take newer figures; cheap, called for every chunk."""
        self._newest[rank] = progress

    def update_sources(self, rank: int, sources: Sequence[tuple[str, int, int]]) -> None:
        """Take what a rank has had from whom so far, as (instance, rank, bytes)."""
        self._sources[rank] = sources

    def failed(self, rank: int, failure: ReportedFailure) -> None:
        """Take a source that a rank gave up, to be reported at once; before the rank's end, and from any thread."""
        self._failures[rank].append(failure)
        self._wake.set()

    def newest(self, rank: int) -> RankProgress:
        return self._newest[rank]

    @property
    def unfinished(self) -> list[int]:
        """The ranks whose end has not been told to this object."""
        return [rank for rank in self._bindings if rank not in self._ended_ranks]

    def finish(self, rank: int, progress: RankProgress, *, sources: Sequence[tuple[str, int, int]]) -> None:
        """Take how a rank ended, to be reported soon; returns at once.

        Args:
            rank: Nothing more is reported of it afterwards.
            progress: In a final state.
            sources: Bytes by source, as (instance, rank, bytes).
        """
        self._ended_ranks.add(rank)
        self._ends[rank] = _End(progress=progress, sources=sources)
        self._wake.set()

    def _run(self) -> None:
        ends_at: float | None = None
        while True:
            # Once it is closing it has been woken already, and waits between its tries.
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            if self._is_closing and ends_at is None:
                ends_at = time.monotonic() + _LAST_REPORTS_S
            away = self._report_ends()
            if ends_at is None:
                self._report_news()
            elif away is None:
                return
            elif time.monotonic() >= ends_at:
                logger.warning("transfer %s: its end could not be reported: %s", self._transfer_id, away)
                return

    def _report_ends(self) -> ServiceUnreachableError | None:
        """Report ranks that have ended; returns why some are still to be reported."""
        for rank, end in list(self._ends.items()):
            try:
                self._send(rank, end.progress, end.sources)
            except ServiceUnreachableError as error:
                return error
            except TransferError as error:
                logger.warning("transfer %s: the end of rank %d was not taken: %s", self._transfer_id, rank, error)
            del self._ends[rank]
        return None

    def _report_news(self) -> None:
        unfinished = self.unfinished
        news = [
            rank
            for rank in unfinished
            if (self._newest[rank], self._sources[rank]) != self._told.get(rank) or self._failures[rank]
        ]
        # Nothing new is reported too: the answer says whether somebody ended the transfer.
        for rank in news or unfinished[:1]:
            progress = self._newest[rank]
            # That it is ready is said once, by `finish`, along with the sources.
            if self._is_over or progress.state.is_final:
                continue
            self._report(rank, progress)

    def _send(
        self, rank: int, progress: RankProgress, sources: Sequence[tuple[str, int, int]] = ()
    ) -> TransferError | None:
        """Report a rank, along with the sources that it gave up; these go again if the service is away."""
        failures = tuple(self._failures[rank])
        try:
            return self._client.report(
                self._transfer_id, self._bindings[rank], progress, sources=sources, failures=failures
            )
        except ServiceUnreachableError:
            failures = ()
            raise
        finally:
            del self._failures[rank][: len(failures)]

    def _report(self, rank: int, progress: RankProgress) -> None:
        sources = self._sources[rank]
        try:
            ended = self._send(rank, progress, sources)
        except ServiceUnreachableError as error:
            logger.debug("progress not reported, moving on: %s", error)
            return
        except NotFoundError as error:
            logger.warning("the service forgot transfer %s, moving on: %s", self._transfer_id, error)
            self._is_over = True
            return
        except TransferError as error:
            logger.warning("progress of transfer %s was not taken: %s", self._transfer_id, error)
            return
        self._told[rank] = progress, sources
        if ended is not None:
            self._is_over = True
            self._control.stop(ended)
