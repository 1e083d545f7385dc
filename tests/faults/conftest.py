"""A nursery for processes, a lab of them for each test, ports that stay ours, and checkpoints to break on the way."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.checkpoints import Content, large, total_bytes, write_checkpoint
from tests.faults.processes import Lab, Nursery
from tests.faults.proxy import Proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A checkpoint on disk, and what is in it."""

    folder: Path
    tensors: dict[str, Content]

    @property
    def nbytes(self) -> int:
        return total_bytes(self.tensors)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def lab(nursery: Nursery, tmp_path: Path) -> Iterator[Lab]:
    """A lab without a service: `lab.serve()` starts it."""
    logs = tmp_path / "logs"
    logs.mkdir()
    lab = Lab(nursery, logs)
    yield lab
    lab.close()


@pytest.fixture
def served(lab: Lab) -> Lab:
    """A lab whose service runs, with state in memory."""
    lab.serve()
    return lab


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """48 MiB, large enough that a transfer has a middle. Not to be written."""
    tensors = large()
    return Model(folder=write_checkpoint(tmp_path_factory.mktemp("model"), tensors), tensors=tensors)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """2 MiB in as many tensors, for tests about something else. Not to be written."""
    tensors = large(mib=2, seed=20)
    return Model(folder=write_checkpoint(tmp_path_factory.mktemp("small"), tensors), tensors=tensors)


@pytest.fixture
def reserve() -> Iterator[Callable[[], int]]:
    """Gives ports of 127.0.0.1 that nobody else is given, for whoever binds them with SO_REUSEADDR.

    A bound socket that does not listen keeps a port out of the kernel's choice, and does not keep a server from it.
    """
    with contextlib.ExitStack() as stack:

        def port() -> int:
            kept = stack.enter_context(socket.socket())
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", 0))
            number = kept.getsockname()[1]
            assert isinstance(number, int)
            return number

        yield port


@pytest.fixture
def proxy(reserve: Callable[[], int]) -> Iterator[Proxy]:
    """A proxy in front of one source; `proxy.flags` are the source's."""
    with Proxy(upstream_port=reserve()) as proxy:
        yield proxy
