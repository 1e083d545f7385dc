"""A target of `weightwire bench fanout`: ready and imported before the clock starts, a source afterwards.

It is told what to pull by a JSON object on its first line of standard input, and answers each further line: `pull` and
`check`. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from weightwire.service.cli.bench_source import synthetic_layout, synthetic_tensors
from weightwire.service.cli.output import error_json, print_json, start_logging
from weightwire.service.cli.pull_json import failed_json, pulled_json
from weightwire.service.client.api import ServiceClient
from weightwire.service.client.pulls import Pulled, PullEvents, PullRequest
from weightwire.service.client.target import Target
from weightwire.transfer.control import Control
from weightwire.transfer.errors import TransferError
from weightwire.transfer.session import RankProgress
from weightwire.transfer.wire.puller import PullOptions
from weightwire.transfer.wire.source import Source, SourceIdentity
from weightwire.transfer.wire.source_server import SourceServer


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOrder:
    """What a target is told.

    Attributes:
        service: URL of the control plane.
        host: Address that it serves on.
        streams: Connections to each source.
    """

    service: str
    token: str
    model: str
    instance_id: str
    host: str
    streams: int
    deadline_s: float

    def to_line(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    gc.freeze()
    start_logging("error")
    order = TargetOrder(**json.loads(sys.stdin.readline()))
    identity = SourceIdentity(instance_id=order.instance_id)
    source = Source(identity)
    with (
        SourceServer(source, host=order.host) as server,
        ServiceClient(order.service, token=order.token, allow_plain_http=True) as client,
    ):
        target = Target(client, identity, sources={identity.rank: source}, url=server.url)
        print_json({"ready": True, "url": server.url})
        with contextlib.closing(_Answers(order, target)) as answers:
            for line in sys.stdin:
                for answer in answers.to(line.strip()):
                    print_json(answer)


class _Answers:
    """What the target says to each line."""

    def __init__(self, order: TargetOrder, target: Target) -> None:
        self._order = order
        self._target = target
        self._pulled: Pulled | None = None
        self._told_half = False

    def to(self, line: str) -> Iterator[dict[str, object]]:
        if line == "pull":
            yield self._pull()
        elif line == "check" and self._pulled is not None:
            shells = self._pulled.shells
            # As they were made: a file, and so the manifest of who read it, may have them in another order.
            layout = synthetic_layout(shells.manifest.total_bytes, len(shells.manifest.tensors))
            made = synthetic_tensors(layout)
            yield {"identical": all(shells.tensor(name).equal(content) for name, content in made)}

    def close(self) -> None:
        self._target.leave()

    def _pull(self) -> dict[str, object]:
        order = self._order
        request = PullRequest(
            model=order.model, deadline_s=order.deadline_s, options=PullOptions(streams=order.streams)
        )
        began = time.monotonic()
        try:
            control = Control(deadline_s=order.deadline_s)
            pulled = self._target.pull(request, control, PullEvents(on_progress=self._moved))
        except TransferError as error:
            failed = failed_json(error, {}, transfer_id=None, seconds=time.monotonic() - began)
            return {**failed, "ended_at": time.monotonic(), "error": error_json(error)}
        # The clock of the machine, which all its processes share.
        ended_at = time.monotonic()
        self._pulled = pulled
        self._target.serve(pulled)
        return {**pulled_json(pulled), "ended_at": ended_at}

    def _moved(self, _rank: int, progress: RankProgress) -> None:
        if not self._told_half and progress.bytes_peer * 2 >= progress.bytes_total > 0:
            self._told_half = True
            print_json({"half": True})


if __name__ == "__main__":
    main()
