"""One source that is read: its streams, the claims that they fetch, and what ends them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from weightwire.transfer.control import Control
from weightwire.transfer.errors import (
    CancelledError,
    DeadlineError,
    DeviceError,
    ManifestError,
    ProtocolError,
    SourceBusyError,
    SourceError,
    SourceLeavingError,
    SourceStalledError,
    SourceUnreachableError,
    TransferError,
)
from weightwire.transfer.manifest import Manifest
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.claims import Claim, Reader
from weightwire.transfer.wire.coverage import Coverage
from weightwire.transfer.wire.damage import DamageRecord
from weightwire.transfer.wire.framing import Frame
from weightwire.transfer.wire.ledger import Ledger
from weightwire.transfer.wire.stream import Damage, Endpoint, Places, SourceStream

logger = logging.getLogger(__name__)

# How often a stream opens its connection again after one that broke, in all.
_MAX_RECONNECTS = 5
# Progress is told in steps of this size: telling it for every chunk would cost more than hashing the chunk.
_REPORT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the streams of one pull share.

    Attributes:
        step_bytes: After how much at the latest it is recorded what is verified.
    """

    shells: Shells
    coverage: Coverage
    control: Control
    on_bytes: Callable[[int], None]
    step_bytes: int = _REPORT_BYTES


class Lane:
    """One source: its streams, and whether it was given up.

    Attributes:
        error: Why it was given up, once it was.
        neighbours: The lanes to all ranks that the same process serves, this one among them.
        rate: Bytes per second of late, by all streams; 0 until it is known.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        manifest: Manifest,
        streams: Sequence[SourceStream],
        *,
        busy_patience_s: float,
        on_given_up: Callable[[Endpoint, TransferError], None],
    ) -> None:
        self.endpoint = endpoint
        self.manifest = manifest
        self.streams = streams
        self.neighbours: list[Lane] = [self]
        self.error: TransferError | None = None
        self.rate = 0.0
        self._busy_patience_s = busy_patience_s
        self._on_given_up = on_given_up
        self._damage = DamageRecord()
        self._lock = threading.Lock()
        if manifest.total_bytes and not manifest.chunk_digests:
            self.give_up(ManifestError(f"{endpoint}: its manifest has no digests, expected those of a loaded source"))

    @property
    def process(self) -> tuple[str, str, int]:
        """What tells the process that serves this rank from others."""
        return self.endpoint.instance_id, self.endpoint.url, self.endpoint.generation

    def connect(self) -> None:
        """Open the connections; one is enough, since a source may have no room for all of them."""
        missing: list[SourceError] = []
        for stream in self.streams:
            try:
                stream.connect()
            except SourceUnreachableError as error:
                missing.append(error)
            except SourceError as error:
                self.give_up(error)
                return
        if len(missing) == len(self.streams):
            self.give_up(missing[0])

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    def abort(self) -> None:
        for stream in self.streams:
            stream.abort()

    def give_up(self, error: TransferError) -> None:
        """Believe, and ask, this source no more. The first error stands."""
        with self._lock:
            is_first = self.error is None
            self.error = self.error or error
        self.abort()
        if is_first:
            logger.warning("gave up %s: %s", self.endpoint, error)
            self._on_given_up(self.endpoint, error)

    def threads(self, ledger: Ledger, work: Work, on_end: Callable[[], None]) -> list[threading.Thread]:
        """One thread for each stream, not started. The lane is given up when the last of them fails."""
        running = [len(self.streams)]

        def run(stream: SourceStream) -> None:
            try:
                self._run(stream, ledger, work, running)
            finally:
                on_end()

        name = f"weightwire-pull-{self.endpoint.instance_id}-{self.endpoint.rank}"
        return [threading.Thread(target=run, args=(stream,), name=name) for stream in self.streams]

    def _run(self, stream: SourceStream, ledger: Ledger, work: Work, running: list[int]) -> None:
        try:
            self._drive(stream, ledger, work)
        except (CancelledError, DeadlineError):
            stream.close()
        except DeviceError as error:
            # Ours, not the source's: no other source would get any further.
            stream.close()
            work.control.stop(error)
        except SourceStalledError as error:
            stream.close()
            # A process that is stopped says nothing on any stream, nor for any of its ranks: to wait for each of them
            # in turn would take minutes.
            for lane in self.neighbours:
                lane.give_up(error)
        except TransferError as error:
            stream.close()
            with self._lock:
                running[0] -= 1
                last = not running[0]
            if last or not _may_pass(error):
                self.give_up(error)
        except Exception as error:
            stream.close()
            logger.exception("%s: stream ended by a fault of ours", self.endpoint)
            self.give_up(SourceError(f"{self.endpoint}: {type(error).__name__}: {error}"))

    def _drive(self, stream: SourceStream, ledger: Ledger, work: Work) -> None:
        """Claim and fetch until nothing is left, or this stream's patience is over."""
        reader = Reader(self)
        reconnects = 0
        broke_without_progress = False
        busy_s = 0.0
        while self.error is None and (claim := ledger.claim(reader, timeout_s=work.control.remaining_s)):
            fetch = _Fetch(claim, self, work)
            try:
                fetch.run(stream)
            except SourceBusyError as error:
                wait_s = _seconds(error)
                busy_s += wait_s
                if busy_s > self._busy_patience_s:
                    raise
                fetch.settle(ledger)
                work.control.pause(wait_s)
            except ProtocolError as error:
                # A bit that flipped on the way spoils a frame's header as well as its payload.
                logger.warning("%s", error)
                fetch.settle(ledger)
                if self._damage.breaks_again():
                    self.give_up(error)
            except (SourceUnreachableError, SourceStalledError) as error:
                reconnects += 1
                stuck = broke_without_progress and not claim.done
                broke_without_progress = not claim.done
                if isinstance(error, SourceStalledError) or stuck or reconnects > _MAX_RECONNECTS:
                    raise
            finally:
                fetch.settle(ledger)
            if claim.done:
                busy_s = 0.0

    def count(self, good_frames: int) -> None:
        """Take down frames that were good."""
        self._damage.count_good(good_frames)

    def count_damage(self, damage: Damage) -> None:
        """Take down a frame that was not.

        Raises:
            ChecksumError: If it is the last one that is put up with.
        """
        logger.warning("%s", damage.error)
        if self._damage.is_last_straw(_name_of(damage.frame)):
            self.give_up(damage.error)
            raise damage.error


class _Fetch:
    """One claim on its way through one stream."""

    def __init__(self, claim: Claim, lane: Lane, work: Work) -> None:
        self._claim = claim
        self._lane = lane
        self._work = work
        self._nbytes = claim.owned
        self._places = Places(claim.segments)
        self._chunks: list[int] = []
        self._good = self._frames = self._unreported = 0
        self._settled = False

    def run(self, stream: SourceStream) -> None:
        claim, lane, control, step = self._claim, self._lane, self._work.control, self._work.step_bytes
        with contextlib.closing(stream.fetch(claim.segments, self._work.shells)) as frames:
            for frame in frames:
                if isinstance(frame, Damage):
                    goes_on = self._take_damage(frame)
                else:
                    self._good += frame.nbytes
                    self._frames += 1
                    if frame.chunk is not None:
                        self._chunks.append(frame.chunk)
                    goes_on = claim.ended(frame.nbytes)
                    if self._good >= step:
                        self._record()
                if self._unreported + self._good >= _REPORT_BYTES:
                    self._report(stream)
                    control.check()
                if lane.error is not None:
                    raise lane.error
                if not goes_on and claim.done < self._nbytes:
                    # The rest is somebody else's by now; what is still on its way is not read.
                    return

    def settle(self, ledger: Ledger) -> None:
        """Record what is verified, and give back the rest; once, however often it is called."""
        if self._settled:
            return
        self._settled = True
        self._record()
        # Before the report, which calls what is not ours: if it raises, nobody must wait for this claim.
        ledger.settle(self._claim)
        self._report(None)

    def _take_damage(self, damage: Damage) -> bool:
        self._record()
        self._places.take(damage.frame.nbytes)
        goes_on = self._claim.ended(damage.frame.nbytes, is_good=False)
        self._lane.count_damage(damage)
        return goes_on

    def _record(self) -> None:
        if not self._good:
            return
        lane = self._lane
        self._work.coverage.add(
            self._places.take(self._good),
            self._chunks,
            endpoint=lane.endpoint,
            chunk_bounds=lane.manifest.chunk_bounds,
        )
        lane.count(self._frames)
        self._unreported += self._good
        self._chunks, self._good, self._frames = [], 0, 0

    def _report(self, stream: SourceStream | None) -> None:
        """Tell how far it is; a source does not answer for the time that this takes."""
        self._record()
        nbytes, self._unreported = self._unreported, 0
        if not nbytes:
            return
        if stream is not None:
            stream.meter.asking = False
        self._work.on_bytes(nbytes)
        if stream is not None:
            stream.meter.asking = True


def _name_of(frame: Frame) -> Hashable:
    """The same for the same bytes, however they were asked for."""
    if frame.chunk is not None:
        return frame.chunk
    region, begin, _ = frame.parts[0]
    return "at", next(region.packed(begin, begin + 1)).offset


def _may_pass(error: TransferError) -> bool:
    """True for what may be one connection's trouble, or lets the others finish; anything else is the source's."""
    return isinstance(error, (SourceUnreachableError, SourceBusyError, SourceLeavingError))


def _seconds(busy: SourceBusyError) -> float:
    stated = busy.facts.get("retry_after_s", 1)
    # Compared before it becomes a float: a document from elsewhere may state a number of a thousand digits.
    return float(min(max(0.05, stated), 86400)) if isinstance(stated, (int, float)) else 1.0
