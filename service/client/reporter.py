"""Tells the service how far a rank is, and hears from it when somebody ends the transfer."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Self

from weightwire.service.client.api import RankBinding, ServiceClient
from weightwire.transfer.control import Control
from weightwire.transfer.errors import NotFoundError, ServiceUnreachableError, TransferError
from weightwire.transfer.session import RankProgress

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.25
# How long the last report is tried; the weights are in place by then, and nobody needs it to use them.
_LAST_REPORT_S = 10.0


class Reporter:
    """Reports the newest progress a few times a second, from a thread of its own.

    Bytes move whether or not the service can be reached: what cannot be reported now is reported later.
    """

    def __init__(self, client: ServiceClient, transfer_id: str, binding: RankBinding, control: Control) -> None:
        self._client = client
        self._transfer_id = transfer_id
        self._binding = binding
        self._control = control
        self._newest = RankProgress()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._report_forever, name="weightwire-report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def update(self, progress: RankProgress) -> None:
        """Take newer figures; cheap, called for every chunk."""
        self._newest = progress

    @property
    def newest(self) -> RankProgress:
        return self._newest

    def finish(self, progress: RankProgress, *, sources: list[tuple[str, int, int]]) -> None:
        """Report the end, and try so for a while if the service is away.

        Args:
            sources: Bytes by source, as (instance, rank, bytes).
        """
        self._stop.set()
        self._thread.join()
        ends_at = time.monotonic() + _LAST_REPORT_S
        while True:
            try:
                self._client.report(self._transfer_id, self._binding, progress, sources=sources)
                return
            except ServiceUnreachableError as error:
                if time.monotonic() >= ends_at:
                    logger.warning("transfer %s: its end could not be reported: %s", self._transfer_id, error)
                    return
                threading.Event().wait(_INTERVAL_S)
            except TransferError as error:
                logger.warning("transfer %s: its end was not taken: %s", self._transfer_id, error)
                return

    def _report_forever(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            progress = self._newest
            # Nothing new is reported too: the answer says whether somebody ended the transfer.
            try:
                ended = self._client.report(self._transfer_id, self._binding, progress)
            except ServiceUnreachableError as error:
                logger.debug("progress not reported, moving on: %s", error)
                continue
            except NotFoundError as error:
                logger.warning("the service forgot transfer %s, moving on: %s", self._transfer_id, error)
                return
            except TransferError as error:
                logger.warning("progress of transfer %s was not taken: %s", self._transfer_id, error)
                continue
            if ended is not None:
                self._control.stop(ended)
                return
