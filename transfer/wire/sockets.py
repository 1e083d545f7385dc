"""What both ends of the data plane set on their sockets."""

from __future__ import annotations

import logging
import socket
import struct

from weightwire.transfer.address import is_loopback

logger = logging.getLogger(__name__)

# Loopback delivers faster than the kernel learns to: a window that is wide from the start saves a fifth of the
# receiver's time. The kernel grants what net.core.rmem_max allows. Other networks keep its own tuning.
_LOOPBACK_WINDOW_BYTES = 4 << 20
# What has been sent and not read yet lies in the caches of the two processors: a queue that outgrows them makes the
# reader wait for memory at every byte.
_LOOPBACK_QUEUE_BYTES = 256 << 10


def tune(sock: socket.socket) -> None:
    """Send small packets at once, and on loopback as fast as the two processes can."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not is_loopback(str(sock.getpeername()[0])):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_WINDOW_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_QUEUE_BYTES)
    if not hasattr(socket, "TCP_CONGESTION"):
        return
    # A default of bbr paces even on loopback, and halves the rate there.
    if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError:
            logger.debug("congestion control cubic is not to be had here")


def timeval(seconds: float) -> bytes:
    """A `struct timeval` for SO_RCVTIMEO and SO_SNDTIMEO; at least a microsecond, since 0 means for ever."""
    return struct.pack("@ll", int(seconds), max(int(seconds % 1 * 1e6), 0 if seconds >= 1 else 1))
