"""Placement in worker threads, bounded in tensors and bytes, so that a slow copy holds the reader back (L48).

A thread pool alone takes whatever it is given: the whole checkpoint would wait in its queue, in host memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

import torch

from weightwire.transfer.checkpoint.reused_buffers import is_reused

DEFAULT_MAX_TENSORS = 16
DEFAULT_MAX_BYTES = 1 << 30

Place = Callable[[torch.Tensor], object]


def default_workers() -> int:
    """L131."""
    return min(32, (os.cpu_count() or 1) + 4)


def belongs_in_pool(tensor: object) -> bool:
    """Whether a worker may place it: on the host, in memory that stays as it is.

    Copies from a device only contend for the interpreter; a reused buffer would be refilled under the worker's hands.
    """
    device = getattr(tensor, "device", None)
    return isinstance(tensor, torch.Tensor) and device == torch.device("cpu") and not is_reused(tensor)


class CurrentDevice(Protocol):
    """The accelerator that a thread's copies go to; thread-local, and the first one in a new thread."""

    def get(self) -> int | None:
        """Index of the calling thread's device; None without accelerator."""
        ...

    def set(self, index: int) -> None:
        """Make it the calling thread's device."""
        ...


class AcceleratorDevice:
    """The device of whatever accelerator torch has."""

    def get(self) -> int | None:
        return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def set(self, index: int) -> None:
        torch.accelerator.set_device_index(index)


class BoundedPlacement:
    """Places tensors in workers; use as a context manager around the stream of a reader.

    At the end of the block everything that was submitted has ended, and the first failure is raised: a model with
    incomplete weights is never handed over. Only one thread may submit.
    """

    def __init__(
        self,
        *,
        max_tensors: int = DEFAULT_MAX_TENSORS,
        max_bytes: int = DEFAULT_MAX_BYTES,
        workers: int | None = None,
        device: CurrentDevice | None = None,
    ) -> None:
        """
        Args:
            max_tensors: Tensors that are queued or being placed.
            max_bytes: Their bytes; a tensor that is larger alone goes alone.
            workers: Threads; `default_workers()` if None.
            device: The accelerator's, if None.
        """
        count = default_workers() if workers is None else workers
        for name, value in (("max_tensors", max_tensors), ("max_bytes", max_bytes), ("workers", count)):
            if value < 1:
                raise ValueError(f"placement: {name} is {value}, expected at least 1")
        self._max_tensors = max_tensors
        self._max_bytes = max_bytes
        self._device = device or AcceleratorDevice()
        self._room = threading.Condition()
        self._tensors = self._bytes = self._submitted = 0
        # Of the tensor that was submitted first, with its number.
        self._failure: tuple[int, BaseException] | None = None
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="weightwire-place")

    @property
    def in_flight(self) -> int:
        """Tensors that are queued or being placed now."""
        with self._room:
            return self._tensors

    @property
    def failed(self) -> bool:
        """Whether a placement has failed; the rest of the stream need not be read then."""
        with self._room:
            return self._failure is not None

    def submit(self, place: Place, tensor: torch.Tensor) -> None:
        """Call `place(tensor)`: in a worker if it belongs there, else here and now.

        Waits while as much is in flight as may be. The caller lets go of `tensor` afterwards; what `place` raises in
        a worker is raised at the end.
        """
        if not belongs_in_pool(tensor):
            place(tensor)
            return
        nbytes = tensor.nbytes
        with self._room:
            self._room.wait_for(lambda: self._has_room(nbytes))
            self._tensors += 1
            self._bytes += nbytes
            number = self._submitted
            self._submitted += 1
        # In a list, so that the worker can let go of the tensor before it makes room for the next.
        self._pool.submit(self._run, number, [(place, tensor)], self._device.get())

    def close(self) -> None:
        """Wait until everything has ended.

        Raises:
            BaseException: The failure of the tensor that was submitted first, as it was raised.
        """
        self._pool.shutdown(wait=True)
        if self._failure is not None:
            raise self._failure[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # What ended the stream is raised; nothing that waits is worth placing.
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _has_room(self, nbytes: int) -> bool:
        fits = self._bytes + nbytes <= self._max_bytes
        return self._tensors == 0 or (self._tensors < self._max_tensors and fits)

    def _run(self, number: int, work: list[tuple[Place, torch.Tensor]], device: int | None) -> None:
        nbytes = work[0][1].nbytes
        try:
            if device is not None:
                self._device.set(device)
            _place(work)
        # Whatever it is, without it a model that is half filled would look finished.
        except BaseException as error:  # noqa: BLE001
            with self._room:
                if self._failure is None or number < self._failure[0]:
                    self._failure = number, error
        finally:
            with self._room:
                self._tensors -= 1
                self._bytes -= nbytes
                self._room.notify()


def _place(work: list[tuple[Place, torch.Tensor]]) -> None:
    place, tensor = work.pop()
    place(tensor)
