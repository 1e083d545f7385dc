"""Two buffers that take turns between a socket and shells: while one is at the socket, the other is at the device.

`Landing` is the way in, `Departure` the way out; each belongs to one connection, and has at most two buffers of a
chunk. Shells on the CPU need neither: their memory itself is what a socket reads and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch

from weightwire.transfer.errors import DeviceError, TransferError
from weightwire.transfer.regions import Region
from weightwire.transfer.staging import Copier, Device, HostDevice, Mark, as_device_errors, await_marks

# Bytes `begin` to `end` of a flat region, in its row-major order.
Span: TypeAlias = tuple[Region, int, int]
WhileStuck: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]

# A copy of a chunk takes a hundredth of it, unless the device has other work.
_SOON_S = 0.1


class Memory(Protocol):
    """Shells, as they are seen here."""

    @property
    def devices(self) -> Mapping[torch.device, Device]:
        """Those that are reached through buffers; none where all memory is plain."""

    def parts(self, region: Region, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The memory of bytes of a flat region: strided uint8 views on their device, in row-major order."""

    def is_plain(self, region: Region) -> bool:
        """Whether all of it is the host's memory, to be read and written directly."""

    def gather(self, region: Region, begin: int, end: int) -> list[memoryview]:
        """Bytes of a plain region."""

    def scatter(self, packed: memoryview, region: Region, begin: int) -> None:
        """Write bytes of a plain region."""


class Arrival(Protocol):
    """A frame that was received and verified."""

    @property
    def payload(self) -> memoryview:
        """Its bytes: the shell's own memory, or a buffer."""

    @property
    def scattered(self) -> Sequence[Span]:
        """Where they go from the buffer."""


A = TypeVar("A", bound=Arrival)


class _Buffers:
    """The buffers of one connection, and its queue at each device."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self._memory = memory
        self._nbytes = nbytes
        self._buffers: list[torch.Tensor] = []
        self._turn = 0
        self._copiers: dict[torch.device, Copier] = {}

    def _next(self) -> torch.Tensor:
        """The buffer whose turn it is; a copy of plain memory is done at once, and needs one alone."""
        wanted = 2 if self._memory.devices else 1
        if len(self._buffers) < wanted:
            self._buffers.append(self._new())
            return self._buffers[-1]
        self._turn = (self._turn + 1) % wanted
        return self._buffers[self._turn - 1]

    def _new(self) -> torch.Tensor:
        device = next(iter(self._memory.devices), None)
        if device is None:
            return torch.empty(self._nbytes, dtype=torch.uint8)
        with as_device_errors():
            return self._copier(device).pinned(self._nbytes)

    def _copier(self, device: torch.device) -> Copier:
        if device not in self._copiers:
            # Of a model that lies on several devices some of the memory may be plain.
            self._copiers[device] = self._memory.devices.get(device, HostDevice()).copier()
        return self._copiers[device]

    def _copy(self, buffer: torch.Tensor, spans: Iterable[Span], *, inwards: bool) -> list[Mark]:
        """Queue the copies between the first bytes of a buffer and the shells; returns how to wait for them."""
        used: dict[torch.device, Copier] = {}
        taken = 0
        try:
            with as_device_errors():
                for span in spans:
                    for part in self._memory.parts(*span):
                        packed = buffer[taken : taken + part.numel()].view(part.shape)
                        taken += part.numel()
                        copier = used[part.device] = self._copier(part.device)
                        copier.copy(*((part, packed) if inwards else (packed, part)))
                return [copier.mark() for copier in used.values()]
        except DeviceError:
            # What was queued before it goes on, and nobody has a mark of it.
            for copier in used.values():
                with contextlib.suppress(DeviceError), as_device_errors():
                    await_marks([copier.mark()])
            raise


class Landing(_Buffers):
    """Where one connection's frames are read to, and how they get from there into the shells.

    Attributes:
        memory: The shells.
    """

    def __init__(self, memory: Memory, nbytes: int, while_stuck: WhileStuck = contextlib.nullcontext) -> None:
        """Args:
        nbytes: Of the largest frame.
        while_stuck: Around a wait for a device that is late; the source is not asked for anything meanwhile.

        Raises:
            DeviceError: If there is no pinned memory left for it.
        """
        super().__init__(memory, nbytes)
        self.memory = memory
        self._while_stuck = while_stuck
        if memory.devices:
            # Now: when frames arrive, whatever fails is taken for the source's fault.
            self._buffers = [self._new(), self._new()]

    def buffer(self, nbytes: int) -> memoryview:
        """Where the next frame that cannot be read into the shells is to be read to, in the order of the frames.

        Buffers take turns without looking: it is `landed` that does not ask for a frame before its buffer is free.
        """
        view: memoryview = self._next().numpy().data
        return view[:nbytes]

    def landed(self, arriving: Generator[A, None, None]) -> Generator[A, None, None]:
        """Take frames into the shells, each while the next is received.

        Args:
            arriving: Receives a frame whenever it is asked for one.

        Yields:
            Each, in order, once all of it lies in the shells.

        Raises:
            DeviceError: If a copy fails. What was yielded before stays good.
            TransferError: Whatever `arriving` raises, after all that it gave.
        """
        # The one whose copy is under way while the next is received, into the other buffer.
        flying: list[tuple[A, list[Mark]]] = []
        try:
            for item in arriving:
                while flying:
                    yield self._arrived(*flying.pop())
                # Not before the one in front was taken: until then the shells may become somebody else's to write.
                marks = self._write(item.payload, item.scattered)
                if marks:
                    flying.append((item, marks))
                else:
                    yield item
            while flying:
                yield self._arrived(*flying.pop())
        except DeviceError:
            raise
        except TransferError:
            # The connection is over, and what it brought before is verified: nobody has to fetch it again.
            while flying:
                yield self._arrived(*flying.pop())
            raise
        finally:
            arriving.close()
            # Whoever is given these bytes next must find nobody who still writes them.
            for _, marks in flying:
                with contextlib.suppress(DeviceError):
                    await_marks(marks)

    def _arrived(self, item: A, marks: list[Mark]) -> A:
        with as_device_errors():
            is_there = all(mark.wait(_SOON_S) for mark in marks)
        if not is_there:
            with self._while_stuck():
                await_marks(marks)
        return item

    def _write(self, payload: memoryview, spans: Sequence[Span]) -> list[Mark]:
        """Begin to write a buffer's bytes; without marks it is done."""
        if not spans:
            return []
        if self._memory.devices:
            return self._copy(torch.frombuffer(payload, dtype=torch.uint8), spans, inwards=True)
        taken = 0
        for region, begin, end in spans:
            self._memory.scatter(payload[taken : (taken := taken + end - begin)], region, begin)
        return []


class Departure(_Buffers):
    """Reads shells for one reader, in frames. A context manager: leaving it ends what is still under way."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        """Args:
        nbytes: Of the largest frame.
        """
        super().__init__(memory, nbytes)
        self._ahead: tuple[Sequence[Span], memoryview, list[Mark]] | None = None

    def __enter__(self) -> Departure:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(DeviceError):
            self._forget()

    def ahead(self, spans: Sequence[Span]) -> None:
        """Begin to copy what `gather` will be asked for next, by this very object; plain memory needs no copy."""
        if self._is_plain(spans):
            return
        self._forget()
        buffer = self._next()
        marks = self._copy(buffer, spans, inwards=False)
        view: memoryview = buffer.numpy().data
        self._ahead = spans, view[: sum(end - begin for _, begin, end in spans)], marks

    def gather(self, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of a frame, one view after the other; good until `gather` is called again.

        Raises:
            DeviceError: If a copy fails.
        """
        if self._is_plain(spans):
            return [view for span in spans for view in self._memory.gather(*span)]
        if self._ahead is None or self._ahead[0] is not spans:
            self.ahead(spans)
        assert self._ahead is not None
        (_, view, marks), self._ahead = self._ahead, None
        await_marks(marks)
        return [view]

    def each(self, frames: Iterable[Sequence[Span]]) -> Iterator[list[memoryview]]:
        """What `gather` gives for one frame after the other, the next being copied while one is looked at."""
        following = iter(frames)
        frame = next(following, None)
        while frame is not None:
            views = self.gather(frame)
            frame = next(following, None)
            if frame is not None:
                self.ahead(frame)
            yield views

    def _is_plain(self, spans: Sequence[Span]) -> bool:
        return not self._memory.devices or all(self._memory.is_plain(region) for region, _, _ in spans)

    def _forget(self) -> None:
        """Wait for what nobody asks for any more: its buffer is needed."""
        if self._ahead is not None:
            marks, self._ahead = self._ahead[2], None
            await_marks(marks)
