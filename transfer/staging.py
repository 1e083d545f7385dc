"""How bytes get between the host and a device: copies that are queued, and marks by which their end is waited for.

A copy on an accelerator goes on after the call that asked for it. So there is one seam, `Device`: memory that its
engine copies from and to directly (pinned), a queue of copies beside those of the engine, and marks in the queue.
`transfer/cuda_copies.py` has the one for CUDA. That of the host itself, which forces the same way on plain memory,
stands here. Who waits for what is decided in `transfer/device_shells.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch

from weightwire.transfer.cuda_copies import CudaDevice
from weightwire.transfer.errors import DeviceError, ManifestError

StagingMode: TypeAlias = Literal["auto", "always"]

HOST = torch.device("cpu")
# What storages may lie on.
DEVICE_TYPES = ("cpu", "cuda")
# For a copy of one chunk. A device that takes longer does not work any more, or its engine has filled it for good.
_PATIENCE_S = 60.0


class Mark(Protocol):
    """A place in a queue of copies."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until all copies before it are done; False if they are not within the time.

        Raises:
            RuntimeError: If one of them failed.
        """


class Copier(Protocol):
    """A queue of copies of its own, done in order. For one thread at a time. Failures are RuntimeErrors."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """New host memory that the device copies from and to: flat, uint8."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue `target <- source`, of equal shape and any strides; neither may be touched before a mark was waited
        for.
        """

    def mark(self) -> Mark:
        """A mark behind all that is queued now."""


class Device(Protocol):
    """What one device offers. Thread-safe."""

    def copier(self) -> Copier:
        """A new queue."""

    def fence(self) -> None:
        """Let copies that are queued from now on, in every queue, come after what the calling thread's stream has to do
        already.
        """


class HostDevice:
    """The CPU's own memory, as if it were a device's: a copy is done when the call returns."""

    def copier(self) -> HostCopier:
        return HostCopier()

    def fence(self) -> None:
        """Nothing of the CPU's is under way behind a call."""


class HostCopier:
    """See `HostDevice`."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.dtype == source.dtype == torch.uint8:
            # By numpy, which copies in the thread that asks: torch wakes a pool of threads for each chunk.
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source)

    def mark(self) -> HostCopier:
        return self

    def wait(self, timeout_s: float) -> bool:
        return True


def open_device(device: torch.device) -> Device:
    """Raises:
    ManifestError: If nobody here can copy from and to it.
    """
    if device.type == "cpu":
        return HostDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise ManifestError(f"device {device}: expected one of {', '.join(DEVICE_TYPES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Which memory is reached through pinned buffers.

    Attributes:
        mode: `auto` stages what does not lie on the CPU; `always` the CPU's memory too, to see the same code at work.
        open: Makes the way to a device.
    """

    mode: StagingMode = "auto"
    open: Callable[[torch.device], Device] = open_device

    def devices(self, used: Iterable[torch.device]) -> Mapping[torch.device, Device]:
        """A way to each device that needs one.

        Raises:
            ManifestError: If there is none.
        """
        return {device: self.open(device) for device in set(used) if device != HOST or self.mode == "always"}


def await_marks(marks: Iterable[Mark]) -> None:
    """Raises:
    DeviceError: If a copy failed, or is not done in time.
    """
    with as_device_errors():
        for mark in marks:
            if not mark.wait(_PATIENCE_S):
                raise DeviceError(f"device: a copy between host and device is not done within {_PATIENCE_S:g} s")


@contextlib.contextmanager
def as_device_errors() -> Iterator[None]:
    """What torch raises for a device, as our error."""
    try:
        yield
    except RuntimeError as error:
        # The first line; what follows is how to debug torch.
        reason = str(error).strip().partition("\n")[0]
        raise DeviceError(f"device: a copy between host and device failed: {reason or type(error).__name__}") from error
