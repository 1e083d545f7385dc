"""`weightwire bench fanout`: one source fills many new instances at once, each on a link of its own."""

from __future__ import annotations

import contextlib
import json as json_module
import queue
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

import typer
from safetensors.torch import save_file

from weightwire.service.cli import flags
from weightwire.service.cli.bench_hosts import Host, Lab, bits_per_second, open_lab
from weightwire.service.cli.bench_source import synthetic_layout, synthetic_tensors
from weightwire.service.cli.bench_target import TargetOrder
from weightwire.service.cli.bench_worker import Json, Worker
from weightwire.service.cli.exit_codes import DONE, FAILED
from weightwire.service.cli.output import human_bytes, print_json, start_logging, stdout
from weightwire.service.cli.render import rows_table
from weightwire.service.cli.signals import on_signal
from weightwire.transfer.errors import CancelledError, DeadlineError, SettingsError

_MODEL = "bench/fanout"
_SOURCE = "first"
_TENSOR_MIB = 4
# Beside the transfer: comparing what arrived, on few cores.
_CHECK_TIMEOUT_S = 300.0
_FAULTS = {"kill": "killed", "stop": "stopped", "cut": "cut"}


def bench_fanout(
    *,
    hosts: Annotated[int, typer.Option(help="New instances; the source is one host more.", min=1, max=63)] = 8,
    rate: Annotated[str, typer.Option(help="Cap of each host's link, each way: kbit, mbit or gbit.")] = "200mbit",
    mib: Annotated[int, typer.Option(help="Size of the weights, in MiB.", min=1)] = 128,
    streams: Annotated[int, typer.Option(help="Connections of each target to each source.", min=1, max=64)] = 2,
    kill: Annotated[
        int | None, typer.Option(help="SIGKILL this target (1 is the first) at half.", min=1, show_default=False)
    ] = None,
    stop: Annotated[int | None, typer.Option(help="SIGSTOP this target at half.", min=1, show_default=False)] = None,
    cut: Annotated[
        int | None, typer.Option(help="Cut this target off the network at half.", min=1, show_default=False)
    ] = None,
    deadline_s: flags.DeadlineS = 600.0,
    json: flags.Json = False,
    log_level: flags.LogLevel = "warning",
) -> int:
    """Fill many new instances from one source, each in a network namespace with a link that is capped both ways.

    The clock runs from when every process is up until the last target is ready; afterwards each compares every byte.
    Needs root and iproute2. The bare ideal is size over rate; headers alone make 1.046 of it.
    """
    start_logging(log_level)
    hits = {number: fault for fault, number in (("kill", kill), ("stop", stop), ("cut", cut)) if number is not None}
    if any(number > hosts for number in hits):
        raise SettingsError(f"--kill, --stop, --cut: target {max(hits)} of {hosts}")
    if len(hits) == hosts:
        raise SettingsError("--kill, --stop, --cut: no target is left to be measured")
    fleet = _Fleet(hosts=hosts, mib=mib, streams=streams, deadline_s=deadline_s, faults=hits)
    # A signal must not leave namespaces behind.
    with on_signal(_interrupt), open_lab(hosts + 1, bits_per_s=bits_per_second(rate)) as lab:
        figures = fleet.run(lab)
    ideal_s = (mib << 23) / bits_per_second(rate)
    if json:
        print_json({**figures.to_json(ideal_s), "error": None})
    else:
        _print(figures, ideal_s)
    return DONE if figures.all_ready else FAILED


def _interrupt() -> None:
    raise CancelledError("bench: stopped by a signal")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What a run showed.

    Attributes:
        seconds: From the start until the last target was ready that nothing was done to.
        targets: By number, what became of each: the JSON that it printed, or its fault as its state.
        bytes_sent: What went out on the source's link meanwhile, as the kernel counts it: with answers of the service,
            with what went to targets that were hit, and with one header for each segment of up to 64 KiB.
    """

    nbytes: int
    seconds: float
    targets: Mapping[int, Json]
    bytes_sent: int

    @property
    def all_ready(self) -> bool:
        untouched = [target for target in self.targets.values() if target["state"] not in _FAULTS.values()]
        return all(target["state"] == "ready" and target["identical"] is True for target in untouched)

    @property
    def bytes_from_first(self) -> int:
        """Verified bytes that targets had from the source itself; those of a target that was hit went with it."""
        given = [source for target in self.targets.values() for source in cast("list[Json]", target.get("sources", []))]
        return sum(cast(int, source["bytes"]) for source in given if source["instance_id"] == _SOURCE)

    def to_json(self, ideal_s: float) -> Json:
        return {
            "seconds": self.seconds,
            "ideal_seconds": ideal_s,
            "ratio": self.seconds / ideal_s,
            "bytes": self.nbytes,
            "per_target": [{"host": number, **target} for number, target in sorted(self.targets.items())],
            "bytes_from_first_source": self.bytes_from_first,
            "bytes_sent_by_first_host": self.bytes_sent,
        }


@dataclass(kw_only=True)
class _Fleet:
    """One run: a service and a source on host 0, a target on each other one."""

    hosts: int
    mib: int
    streams: int
    deadline_s: float
    faults: Mapping[int, str]
    heard: queue.Queue[tuple[str, Json | None]] = field(default_factory=queue.Queue)

    def run(self, lab: Lab) -> _Figures:
        token = secrets.token_urlsafe(32)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightwire-bench-")))
            service = self._start_service(stack, lab.hosts[0], token)
            flag = ("--service", service, "--token", token, "--model", _MODEL, "--instance-id", _SOURCE)
            listen = ("--host", lab.hosts[0].address, "--allow-plain-http", "--log-level", "error", "--json")
            source = [*_command("source"), str(_write_checkpoint(folder, self.mib)), *flag, *listen]
            stack.enter_context(Worker("the source", lab.hosts[0].command(source))).hear()
            targets = dict(self._start_targets(stack, lab, service, token))
            sent, began = lab.bytes_sent(lab.hosts[0]), time.monotonic()
            for target in targets.values():
                target.tell("pull")
            ends = self._follow(targets, lab)
            sent = lab.bytes_sent(lab.hosts[0]) - sent
            self._check(targets, ends)
        untouched = [end for end in ends.values() if end["state"] not in _FAULTS.values()]
        for end in untouched:
            end["seconds"] = cast(float, end.pop("ended_at")) - began
        last = max(cast(float, end["seconds"]) for end in untouched)
        return _Figures(nbytes=self.mib << 20, seconds=last, targets=ends, bytes_sent=sent)

    def _start_service(self, stack: contextlib.ExitStack, host: Host, token: str) -> str:
        listen = ("--host", host.address, "--port", "0", "--store", "memory", "--allow-plain-http")
        command = [*_command("serve"), *listen, "--token", token, "--log-level", "error", "--json"]
        return str(stack.enter_context(Worker("the service", host.command(command))).hear()["url"])

    def _start_targets(
        self, stack: contextlib.ExitStack, lab: Lab, service: str, token: str
    ) -> Iterator[tuple[int, Worker]]:
        """All at once, and each is there when it has imported everything and listens."""
        started = {}
        for number, host in enumerate(lab.hosts[1:], start=1):
            command = host.command([sys.executable, "-m", "weightwire.service.cli.bench_target"])
            target = stack.enter_context(Worker(f"target {number}", command, lines=self.heard))
            order = TargetOrder(
                service=service, token=token, model=_MODEL, instance_id=f"joiner-{number}", host=host.address,
                streams=self.streams, deadline_s=self.deadline_s,
            )  # fmt: skip
            target.tell(order.to_line())
            started[number] = target
        for _ in started:
            self._hear(_CHECK_TIMEOUT_S)
        yield from started.items()

    def _follow(self, targets: Mapping[int, Worker], lab: Lab) -> dict[int, Json]:
        """Wait until every target is ready that is not hit on the way; returns how each ended."""
        numbers = {target.name: number for number, target in targets.items()}
        ends: dict[int, Json] = {}
        ends_at = time.monotonic() + self.deadline_s
        while len(ends) < len(targets):
            name, line = self._hear(ends_at - time.monotonic())
            number = numbers[name]
            if line is None or "half" not in line:
                # Whoever is killed ends without a word.
                ends.setdefault(number, line or {"state": "failed", "ended_at": time.monotonic()})
            elif number in self.faults:
                self._hit(self.faults[number], targets[number], lab, lab.hosts[number])
                ends[number] = {"state": _FAULTS[self.faults[number]]}
        return ends

    def _hit(self, fault: str, target: Worker, lab: Lab, host: Host) -> None:
        if fault == "cut":
            lab.cut(host)
        else:
            target.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    def _check(self, targets: Mapping[int, Worker], ends: Mapping[int, Json]) -> None:
        """Let each ready target compare what it has with what the source made; the clock stands still."""
        ready = [number for number, end in ends.items() if end["state"] == "ready"]
        for number in ready:
            targets[number].tell("check")
        numbers = {target.name: number for number, target in targets.items()}
        waiting = set(ready)
        for number in ready:
            ends[number]["identical"] = False
        while waiting:
            name, line = self._hear(_CHECK_TIMEOUT_S)
            number = numbers[name]
            if line is None or "identical" in line:
                waiting.discard(number)
            if line is not None and number in ready:
                ends[number].update(line)

    def _hear(self, timeout_s: float) -> tuple[str, Json | None]:
        try:
            return self.heard.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise DeadlineError(f"bench: targets said nothing for {timeout_s:g} s") from None


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "weightwire.service.cli", name]


def _write_checkpoint(folder: Path, mib: int) -> Path:
    """A checkpoint of synthetic tensors."""
    layout = synthetic_layout(mib << 20, max(1, mib // _TENSOR_MIB))
    save_file(dict(synthetic_tensors(layout)), folder / "model.safetensors")
    (folder / "config.json").write_text(json_module.dumps({"model_type": "bench"}), "utf-8")
    return folder


def _print(figures: _Figures, ideal_s: float) -> None:
    rows = []
    for number, target in sorted(figures.targets.items()):
        sources = cast("list[Json]", target.get("sources", []))
        given = ", ".join(f"{source['instance_id']} {human_bytes(cast(int, source['bytes']))}" for source in sources)
        seconds = f"{target['seconds']:.2f} s" if "seconds" in target else ""
        rows.append([str(number), str(target["state"]), seconds, given])
    stdout.print(rows_table("targets", ["host", "state", "after", "from"], rows))
    ratio = figures.seconds / ideal_s
    stdout.print(
        f"all ready after {figures.seconds:.2f} s, {ratio:.2f} of the bare ideal of {ideal_s:.2f} s; the source's link "
        f"sent {human_bytes(figures.bytes_sent)} of {human_bytes(figures.nbytes)}"
    )
