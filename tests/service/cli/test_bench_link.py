"""The bench's own faulty link: it flips, cuts and paces what it carries, at the places that it was told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from weightwire.service.cli.bench_link import FaultyLink, LinkFaults
from weightwire.transfer.address import Address

CONTENT = bytes(range(256)) * 4096


@contextlib.contextmanager
def sender(content: bytes) -> Iterator[int]:
    """Sends `content` to whoever connects and has said one byte; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client, contextlib.suppress(OSError):
                        client.recv(1)
                        client.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def carried(faults: LinkFaults, *, connections: int = 1) -> list[bytes]:
    """What arrives over the link, of one connection after the other."""
    with sender(CONTENT) as port, FaultyLink(faults, upstream_port=port) as link:
        address = Address.parse(link.url)
        arrived = []
        for _ in range(connections):
            with socket.create_connection((address.host, address.port)) as reader, reader.makefile("rb") as file:
                reader.sendall(b"x")
                arrived.append(file.read())
    return arrived


def test_link_without_faults_carries_everything() -> None:
    assert carried(LinkFaults(), connections=2) == [CONTENT, CONTENT]


def test_link_flips_one_bit_in_so_many_bytes_counted_over_all_connections() -> None:
    arrived = carried(LinkFaults(flip_every_bytes=600_000), connections=2)
    together = b"".join(arrived)
    wrong = [at for at, (sent, got) in enumerate(zip(CONTENT * 2, together, strict=True)) if sent != got]
    assert wrong == [600_000, 1_200_000, 1_800_000]
    assert all((CONTENT * 2)[at] ^ together[at] == 1 for at in wrong)


def test_link_cuts_one_connection_where_it_was_told_and_no_other() -> None:
    assert carried(LinkFaults(cut_after_bytes=300_000), connections=2) == [CONTENT[:300_000], CONTENT]


def test_link_with_a_rate_carries_everything() -> None:
    assert carried(LinkFaults(bytes_per_s=100e6), connections=2) == [CONTENT, CONTENT]


@pytest.mark.parametrize("faults", [LinkFaults(), LinkFaults(flip_every_bytes=3, cut_after_bytes=4, bytes_per_s=5.5)])
def test_faults_survive_a_command_line(faults: LinkFaults) -> None:
    assert LinkFaults.from_text(faults.to_text()) == faults
