"""Hosts that are none: network namespaces of this machine, each with a link of its own that is capped both ways.

Every host has one interface, `eth0`, on a switch that has no way out: nothing that runs in them can reach the network
of the machine, and labs of two runs cannot reach each other. Files, memory and processors are common to all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from weightwire.transfer.errors import SettingsError

MAX_HOSTS = 64
_SUBNET = "10.78.0"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# A hop may send so much at once: a transfer of a second is held to its rate, and the 64 KiB segments that virtual
# links hand on whole still fit.
_BURST_S = 0.004
_LEAST_BURST_BYTES = 128 << 10
# The machine's default may be bbr, which measures a path anew for each flow, and finds the cap late.
_CONGESTION = "reno"


def bits_per_second(rate: str) -> float:
    """`200mbit` as a number, spelled as `tc` spells rates.

    Raises:
        SettingsError: If it is no such rate.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not found or not float(found[1]):
        raise SettingsError(f"--rate {rate!r}: expected a number and kbit, mbit or gbit, such as 200mbit")
    return float(found[1]) * _UNITS[found[2]]


def check_possible() -> None:
    """Raises:
    SettingsError: If this process may not make hosts, or lacks the programs.
    """
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if os.geteuid() or missing:
        lacks = f"no {' and no '.join(missing)} (iproute2)" if missing else "not root"
        raise SettingsError(f"bench fanout: {lacks}; network namespaces with capped links need root, ip and tc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host.

    Attributes:
        namespace: Its network namespace.
        address: Of its only interface.
        port: The name of the switch's end of its link.
    """

    namespace: str
    address: str
    port: str

    def command(self, command: list[str]) -> list[str]:
        """The command that runs `command` in this host, under the same process id."""
        return ["ip", "netns", "exec", self.namespace, *command]


class Lab:
    """Some hosts on one switch, numbered from 0. Made by `open_lab`, which also takes them away."""

    def __init__(self, count: int, *, bits_per_s: float) -> None:
        """Args:
        count: Of hosts.
        bits_per_s: Of each link, each way.
        """
        if not 1 <= count <= MAX_HOSTS:
            raise SettingsError(f"{count} hosts: expected 1 to {MAX_HOSTS}")
        prefix = f"wwbench-{os.getpid()}"
        self._switch = f"{prefix}-switch"
        self._bits_per_s = bits_per_s
        self.hosts = tuple(
            Host(namespace=f"{prefix}-{number}", address=f"{_SUBNET}.{number + 1}", port=f"port{number}")
            for number in range(count)
        )

    def build(self) -> None:
        """Raises:
        SettingsError: If the kernel does not do it.
        """
        _run("ip", "netns", "add", self._switch)
        # A bridge that learns who is where for 15 seconds before it forwards would be a dead one here.
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for host in self.hosts:
            self._connect(host)

    def remove(self) -> None:
        """Take away what `build` made, however far it came; whoever runs there loses the network."""
        for namespace in (*(host.namespace for host in self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL)

    def cut(self, host: Host) -> None:
        """Take a host off the switch: nobody hears of it, not even that it is gone."""
        _run("ip", "-n", self._switch, "link", "set", host.port, "nomaster")

    def bytes_sent(self, host: Host) -> int:
        """Bytes that a host has put on its link, as the kernel counts them: before it cuts segments into packets."""
        shown = _run("ip", "-n", host.namespace, "-s", "-j", "link", "show", "eth0")
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def _connect(self, host: Host) -> None:
        inside, outside = ("ip", "-n", host.namespace), ("ip", "-n", self._switch)
        _run("ip", "netns", "add", host.namespace)
        link = ("link", "add", "eth0", "netns", host.namespace, "type", "veth")
        _run("ip", *link, "peer", "name", host.port, "netns", self._switch)
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "lo", "up")
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        _run(*host.command(["sh", "-c", f"echo {_CONGESTION} > {setting}"]))
        _run(*outside, "link", "set", host.port, "master", "br0", "up")
        _run(*inside, "link", "set", "eth0", "up")
        self._cap(host.namespace, "eth0")
        self._cap(self._switch, host.port)

    def _cap(self, namespace: str, device: str) -> None:
        """Cap what goes out at one end of a link."""
        burst = max(_LEAST_BURST_BYTES, int(self._bits_per_s / 8 * _BURST_S))
        shape = ("rate", f"{self._bits_per_s:.0f}bit", "burst", str(burst), "latency", "50ms")
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape)


@contextlib.contextmanager
def open_lab(count: int, *, bits_per_s: float) -> Iterator[Lab]:
    """A lab for the length of the block.

    Raises:
        SettingsError: If there cannot be one.
    """
    check_possible()
    lab = Lab(count, bits_per_s=bits_per_s)
    try:
        lab.build()
        yield lab
    finally:
        lab.remove()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SettingsError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
