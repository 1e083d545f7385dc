"""What both ends of the data plane set on their sockets."""

from __future__ import annotations

import logging
import socket
import struct
from dataclasses import dataclass

from weightwire.transfer.address import is_loopback
from weightwire.transfer.errors import SettingsError

logger = logging.getLogger(__name__)

_BACKLOG = 256

# Loopback delivers faster than the kernel learns to: a window that is wide from the start saves a fifth of the
# receiver's time. The kernel grants what net.core.rmem_max allows. Other networks keep its own tuning.
_LOOPBACK_WINDOW_BYTES = 4 << 20
# What has been sent and not read yet lies in the caches of the two processors: a queue that outgrows them makes the
# reader wait for memory at every byte.
_LOOPBACK_QUEUE_BYTES = 768 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """How sockets behave on long and unreliable links.

    A peer that is gone without a word (its machine lost power, a firewall forgot the connection) is noticed by the
    kernel after `idle_s + probes * probe_interval_s`, or `unacknowledged_s` if something was under way to it.

    Attributes:
        buffer_bytes: Window of each connection; None leaves it to the kernel, which makes it grow with what the link
            takes. A fixed one ends that, and is granted up to net.core.rmem_max and wmem_max.
        idle_s: Silence after which the kernel asks whether the peer is still there.
        probe_interval_s: Time between such questions.
        probes: How many go unanswered before the connection is dead.
        unacknowledged_s: How long bytes may be under way without a sign that they arrived.
    """

    buffer_bytes: int | None = None
    idle_s: int = 10
    probe_interval_s: int = 5
    probes: int = 3
    unacknowledged_s: int = 30


def set_buffers(sock: socket.socket, options: SocketOptions) -> None:
    """Fix the window, if that is asked for; before connecting, since the handshake agrees on how large it may get."""
    if options.buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.buffer_bytes)


def listen(host: str, port: int, options: SocketOptions) -> socket.socket:
    """A socket that listens there, for both families where `host` is `::`; port 0 takes any that is free.

    Raises:
        SettingsError: If the address cannot be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A restarted source has its port again while connections of the former one linger.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            serve_both_families(sock)
            set_buffers(sock, options)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(
            f"address {host}:{port} cannot be bound: {reason or error}; another process may hold the port",
            host=host,
            port=port,
        ) from error
    return sock


def serve_both_families(sock: socket.socket) -> None:
    """Let a socket that is bound to `::` take IPv4, too, whatever the machine's default is."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def tune(sock: socket.socket, options: SocketOptions | None = None) -> None:
    """Send small packets at once, notice peers that are gone, and be on loopback as fast as the two processes can."""
    options = options or SocketOptions()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(sock, options)
    if not is_loopback(str(sock.getpeername()[0])):
        return
    if options.buffer_bytes is None:
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


def _keep_alive(sock: socket.socket, options: SocketOptions) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, options.idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, options.probe_interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, options.probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, options.unacknowledged_s * 1000)


def timeval(seconds: float) -> bytes:
    """A `struct timeval` for SO_RCVTIMEO and SO_SNDTIMEO; at least a microsecond, since 0 means for ever."""
    return struct.pack("@ll", int(seconds), max(int(seconds % 1 * 1e6), 0 if seconds >= 1 else 1))
