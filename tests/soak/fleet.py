"""A small fleet over loopback: a service, sources behind proxies, and targets that come and go."""

from __future__ import annotations

import contextlib
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import safetensors

from tests.faults.checkpoints import Content, large, read_file, total_bytes, write_checkpoint
from tests.faults.processes import Lab, Nursery, Running, wait_until
from tests.faults.proxy import Proxy, passed
from tests.soak.schedule import NUM_SOURCES
from weightwire.service.client import ServiceClient

MODEL_MIB = 24
# Contents that weight versions have in turns: a mixture of two neighbours is seen in every tensor.
_CONTENTS = 3


@dataclass(kw_only=True)
class FleetSource:
    """A source, and the proxy before it; both keep their ports when the process is another one."""

    instance_id: str
    proxy: Proxy
    process: Running
    version: int
    is_dead: bool = False


@dataclass(kw_only=True)
class FleetTarget:
    """A target.

    Attributes:
        url: Where it serves, once it does, if it does.
        folder: Where it saves.
    """

    instance_id: str
    process: Running
    serves: bool
    url: str
    folder: Path
    probes: int = field(default=0)


class Fleet:
    """Everything that runs in a soak. Leaving the block ends it all.

    Attributes:
        version: The newest of the weights.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.sources: list[FleetSource] = []
        self.version = 1

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        self._contents = [large(mib=MODEL_MIB, seed=100 * (number + 1)) for number in range(_CONTENTS)]
        self._checkpoints = [
            write_checkpoint(self._folder / f"content-{number}", content)
            for number, content in enumerate(self._contents)
        ]
        nursery = Nursery()
        self._stack.callback(nursery.close)
        self.lab = Lab(nursery, self._folder)
        self._stack.callback(self.lab.close)
        self._service_flags = ("--port", self._port(), "--store", f"sqlite:{self._folder / 'state.db'}", "--lease-s", 2)
        self.start_service()
        self.client = self._stack.enter_context(ServiceClient(self.lab.service))
        for number in range(NUM_SOURCES):
            proxy = self._stack.enter_context(Proxy(upstream_port=self._port()))
            name = f"source-{number}"
            process = self._start_source(name, proxy, self.version)
            self.sources.append(FleetSource(instance_id=name, proxy=proxy, process=process, version=self.version))
        self.heal()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def nbytes(self) -> int:
        return total_bytes(self._contents[0])

    @property
    def long_lived(self) -> dict[str, int]:
        """Process ids of those that stay, by role and name."""
        return {"service": self.service.pid} | {each.instance_id: each.process.pid for each in self.sources}

    def content(self, version: int) -> Mapping[str, Content]:
        return self._contents[version % _CONTENTS]

    def start_service(self) -> None:
        self.service = self.lab.serve(*self._service_flags)

    def restart_service(self) -> None:
        """Kill it, and start another one on its port and its state."""
        self.service.kill()
        self.start_service()

    def kill_source(self, source: FleetSource) -> None:
        source.process.kill()
        source.is_dead = True

    def renew_source(self, source: FleetSource) -> None:
        """The same instance with the next version, in another process."""
        self.version += 1
        self.kill_source(source)
        self._revive(source)

    def start_target(self, name: str, *, serves: bool) -> FleetTarget:
        folder = self._folder / name
        port = self._port() if serves else 0
        flags = ("--serve", "--port", port) if serves else ()
        process = self.lab.pull("--instance-id", name, "--save", folder, *flags, "--deadline-s", 60)
        return FleetTarget(
            instance_id=name, process=process, serves=serves, url=f"http://127.0.0.1:{port}", folder=folder
        )

    def heal(self) -> None:
        """Bring every source back, to the newest version, and wait until the service would choose them all."""
        for source in self.sources:
            source.proxy.faults.clear()
            source.proxy.always = passed
            source.proxy.release()
            source.process.send_signal(signal.SIGCONT)
            if source.is_dead or source.version != self.version:
                self.kill_source(source)
                self._revive(source)
        wait_until(self._all_ready)

    def check_saved(self, target: FleetTarget, version: int) -> None:
        """Check that what a target saved is one version, bit for bit."""
        saved = read_file(target.folder / "rank-0.safetensors")
        (target.folder / "rank-0.safetensors").unlink()
        _check_equal(saved, self.content(version), f"{target.instance_id}: saved")

    def check_served(self, target: FleetTarget, version: int) -> None:
        """Check that what a target serves is one version, bit for bit."""
        answer = httpx.get(f"{target.url}/v1/export.safetensors", timeout=30, trust_env=False)
        assert answer.status_code == 200, f"{target.instance_id}: its export answers {answer.status_code}"
        found = {
            name: Content(tag=info["dtype"], shape=tuple(info["shape"]), data=bytes(info["data"]))
            for name, info in safetensors.deserialize(answer.content)  # type: ignore[no-untyped-call]
        }
        _check_equal(found, self.content(version), f"{target.instance_id}: served")

    def probe(self, target: FleetTarget) -> None:
        """Ask a target that is not ready for a tensor: whatever it gives has to be whole, and of one version."""
        name = "layers.7.mlp.weight"
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{target.url}/v1/tensors/{name}", timeout=5, trust_env=False)
            target.probes += 1
            if answer.status_code == 200:
                whole = [content[name].data for content in self._contents]
                assert answer.content in whole, f"{target.instance_id}: serves a torn tensor"

    def _port(self) -> int:
        """A port that stays ours: bound and not listening, it is nobody else's."""
        kept = self._stack.enter_context(socket.socket())
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        number = kept.getsockname()[1]
        assert isinstance(number, int)
        return number

    def _start_source(self, name: str, proxy: Proxy, version: int) -> Running:
        checkpoint = self._checkpoints[version % _CONTENTS]
        return self.lab.ready_source(
            checkpoint, *proxy.flags, "--instance-id", name, "--weight-version", version, "--revision", "soak"
        )

    def _revive(self, source: FleetSource) -> None:
        source.process = self._start_source(source.instance_id, source.proxy, self.version)
        source.version = self.version
        source.is_dead = False

    def _all_ready(self) -> bool:
        known = {item["instance_id"]: item for item in self.client.sources(self.lab.model)}
        found = [known.get(source.instance_id, {}) for source in self.sources]
        return all((item.get("state"), item.get("weight_version")) == ("ready", self.version) for item in found)


def _check_equal(found: Mapping[str, Content], expected: Mapping[str, Content], what: str) -> None:
    assert sorted(found) == sorted(expected), f"{what}: other tensors"
    wrong: Sequence[str] = [name for name in expected if found[name] != expected[name]]
    assert not wrong, f"{what}: other bytes in {wrong}"
