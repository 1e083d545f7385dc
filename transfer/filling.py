"""Fills one rank's shells: from the sources what they hold, from disk what is missing, and proves the result.

This is the library's one entry to a transfer of weights; it knows no service. `fill` plans, checks that everything
has an origin before a byte is written, pulls, plans again with what is left whenever a source is lost, reads the rest
from disk, and compares digests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from weightwire.transfer.agreement import check_specs, disagreement, holds_the_same
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.checkpoint.regions_on_disk import read_copies
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.disk_pieces import disk_copies, names_on_disk
from weightwire.transfer.errors import FencedError, IntegrityError, ManifestMismatchError
from weightwire.transfer.integrity import checksum, digest_text
from weightwire.transfer.intervals import IntervalSet
from weightwire.transfer.manifest import Manifest, TensorEntry
from weightwire.transfer.plan import Plan
from weightwire.transfer.planning import PlannedPull, Supply, check_servable, entangled, missing_tensors
from weightwire.transfer.regions import Region
from weightwire.transfer.session import RankProgress, TransferState
from weightwire.transfer.shells import Shells
from weightwire.transfer.wire.held import Held
from weightwire.transfer.wire.puller import Puller, PullOptions, SourceFailure
from weightwire.transfer.wire.stream import Endpoint

logger = logging.getLogger(__name__)

# How much is compared before sources and disk are mixed: a sample of tensors of all sizes.
_SAMPLES = 8
_SAMPLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Where weights may come from.

    Attributes:
        endpoints: Sources, in order of preference.
        manifests: By digest; has that of every endpoint.
        checkpoint: The local disk, if it has the model.
        planned: What was planned of them already, as far as it still holds.
    """

    endpoints: Sequence[Endpoint] = ()
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    planned: PlannedPull | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBytes:
    """Verified bytes that one source gave."""

    instance_id: str
    rank: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult:
    """How a rank was filled. Every element has one origin, and every digest that exists was compared.

    Attributes:
        seconds: Of the whole.
        seconds_peer: While sources were read.
        seconds_disk: While the disk was read.
        tensors: Number of runtime tensors by way; one with any piece from disk counts as `disk`.
        bytes_peer: Shell bytes that came from sources.
        bytes_disk: Shell bytes that came from disk.
        bytes_received: Bytes of sources' answers, among them those that were damaged, or came from a source that was
            given up.
        failures: Sources that were given up on the way.
    """

    seconds: float
    seconds_peer: float
    seconds_disk: float
    tensors: Mapping[str, int]
    bytes_peer: int
    bytes_disk: int
    sources: tuple[SourceBytes, ...]
    failures: tuple[SourceFailure, ...]
    bytes_received: int = 0


def fill(
    shells: Shells,
    origins: Origins,
    *,
    control: Control,
    options: PullOptions | None = None,
    on_progress: Callable[[RankProgress], None] = lambda _: None,
    on_sources: Callable[[Sequence[SourceBytes]], None] = lambda _: None,
    on_failure: Callable[[SourceFailure], None] = lambda _: None,
    held: Held | None = None,
) -> FillResult:
    """Fill every element of `shells`, or raise.

    Args:
        shells: Written. After an error their contents are of no use; they were never ready.
        origins: Sources and disk.
        control: Deadline and stop button.
        options: Of the wire.
        on_progress: Called with growing figures, from several threads, one at a time.
        on_sources: Called in the same way with what each source has given so far.
        on_failure: Called for each source that is given up, when it is, from any thread.
        held: Of the same shells, for those who read them meanwhile: is told what is verified, and completed at the end.
            It is failed at once if its manifest is none that is taken from.

    Raises:
        ManifestMismatchError: Before a byte is written, if source, disk and shells disagree about a tensor.
        CoverageError: If a tensor is nowhere. Before a byte is written, unless the last source that had it is lost.
        IntegrityError: If the finished bytes are not those that the manifest promised.
        CancelledError: If somebody stopped it.
        DeadlineError: If its time is over.
    """
    return _Filling(shells, origins, control, (on_progress, on_sources), held=held).run(options, on_failure)


class _Filling:
    def __init__(
        self,
        shells: Shells,
        origins: Origins,
        control: Control,
        listeners: tuple[Callable[[RankProgress], None], Callable[[Sequence[SourceBytes]], None]],
        *,
        held: Held | None,
    ) -> None:
        self._shells = shells
        self._target = shells.manifest
        self._origins = origins
        self._control = control
        self._on_progress, self._on_sources = listeners
        self._held = held
        self._lock = threading.Lock()
        self._progress = RankProgress()
        self._from_disk: set[Region] = set()
        self._refused: list[SourceFailure] = []
        self._endpoints: Sequence[Endpoint] = ()
        self._planned = origins.planned
        self._specs = {spec.name: spec for spec in specs_of(origins.checkpoint)} if origins.checkpoint else {}
        self._on_disk: Set[str] = names_on_disk(self._target, self._specs)
        # Whole tensors under the checkpoint's own names, which can be compared with it.
        self._published = {
            name
            for name in self._target.whole & self._specs.keys()
            if self._specs[name].dtype == self._target.by_name[name].dtype
        }

    def run(self, options: PullOptions | None, on_failure: Callable[[SourceFailure], None]) -> FillResult:
        began = time.monotonic()
        check_specs(self._target, self._specs)
        agreeing = self._agreeing()
        self._check_held(agreeing)
        # Whatever the caller's stream does to the shells comes first. Each copy into them is waited for, so that what
        # is told to any stream afterwards finds the weights.
        self._shells.fence()
        has_disk = self._origins.checkpoint is not None
        if self._held is not None:
            options = replace(options or PullOptions(), pipelined=True)
        with Puller(
            self._shells, agreeing, self._origins.manifests, options, has_spare=has_disk, on_failure=on_failure
        ) as puller:
            self._puller = puller
            if self._held is not None:
                puller.coverage.on_verified = self._held.add
            plan = self._plan(puller)
            check_servable(plan)
            # What comes as it is brings its padding along, and is more than what belongs into the shells.
            self._progress = replace(self._progress, bytes_total=sum(way.nbytes for way in plan.ways))
            self._check_disk_agrees(plan)
            self._report(state=TransferState.RECEIVING)
            asked = time.monotonic()
            left = self._pull(puller, plan)
        pulled = time.monotonic()
        self._read_disk(left, puller)
        read = time.monotonic()
        self._report(state=TransferState.VERIFYING)
        self._verify(puller)
        if self._held is not None:
            self._held.complete()
        self._report(state=TransferState.READY)
        return self._result(plan, puller, seconds=(time.monotonic() - began, pulled - asked, read - pulled))

    def _agreeing(self) -> list[Endpoint]:
        """The sources that hold the same values as the preferred one, wherever both hold a tensor."""
        accepted: dict[str, Manifest] = {}
        agreeing: list[Endpoint] = []
        for endpoint in self._origins.endpoints:
            manifest = self._origins.manifests[endpoint.manifest]
            name = None if endpoint.manifest in accepted else disagreement(manifest, accepted.values())
            if name is None:
                accepted[endpoint.manifest] = manifest
                agreeing.append(endpoint)
                continue
            detail = f"{endpoint}: tensor {name!r} has another value than on the sources that are preferred"
            logger.warning("not taken: %s", detail)
            self._refused.append(
                SourceFailure(
                    instance_id=endpoint.instance_id, rank=endpoint.rank, code=ManifestMismatchError.code, detail=detail
                )
            )
        self._endpoints = agreeing
        return agreeing

    def _check_held(self, agreeing: Sequence[Endpoint]) -> None:
        """Hand nothing on under a manifest that is not taken from: it would promise other values."""
        if self._held is not None and self._held.manifest.digest not in {endpoint.manifest for endpoint in agreeing}:
            self._held.fail(FencedError("its manifest has other values than the sources that are taken from"))
            self._held = None

    def _check_disk_agrees(self, plan: Plan) -> None:
        """Before sources and disk are mixed, compare some tensors that both have: they may be two trainings.

        Raises:
            IntegrityError: If one differs.
        """
        checkpoint = self._origins.checkpoint
        if checkpoint is None or not plan.nbytes("disk") or not any(plan.copies):
            return
        both = [tensor for tensor in self._target.tensors if tensor.name in self._published and self._promise(tensor)]
        budget = _SAMPLE_BYTES
        for tensor in sorted(both, key=lambda tensor: -tensor.nbytes)[:: max(1, len(both) // _SAMPLES)]:
            if tensor.nbytes > budget:
                continue
            budget -= tensor.nbytes
            self._control.check()
            held = self._promise(tensor)
            assert held is not None
            raw = memoryview(bytearray(tensor.nbytes))
            checkpoint.read_into(tensor.name, 0, tensor.nbytes, raw)
            if digest_text(checksum([raw])) != held.by_name[tensor.name].digest:
                raise IntegrityError(
                    f"tensor {tensor.name!r}: the checkpoint on disk has another value than the sources; they are "
                    "two trainings of one model, and would be mixed",
                    tensor=tensor.name,
                )

    def _plan(self, puller: Puller) -> Plan:
        """What is still to be done with the sources that are left."""
        supply = Supply(
            lost=puller.lost,
            capacities=puller.capacities,
            rates=puller.rates,
            on_disk=self._on_disk,
            covered=puller.coverage.target or None,
        )
        if self._planned is None:
            self._planned = PlannedPull.of(self._target, puller.manifests, supply)
        else:
            self._planned = self._planned.planned(self._target, puller.manifests, supply)
        return self._planned.plan

    def _pull(self, puller: Puller, plan: Plan) -> Plan:
        """Pull until the live sources have nothing more to give; returns the plan of what is left."""
        while any(plan.copies):
            before, ended_early = puller.lost, False
            puller.connect(plan)
            if puller.lost == before:
                ended_early = puller.pull(plan, self._control, self._count_peer)
            left = self._plan(puller)
            if puller.lost == before and not ended_early and any(left.copies):
                # Every lane of some manifest ended without finishing and without an error; it would again.
                raise IntegrityError("transfer: the sources that are left do not finish what they were asked for")
            plan = left
        return plan

    def _read_disk(self, plan: Plan, puller: Puller) -> None:
        """Read what is not covered yet, straight into the shells, and only these bytes."""
        checkpoint = self._origins.checkpoint
        if plan.nowhere:
            error = missing_tensors(plan.nowhere)
            lost = "; ".join(f"{failure.code}: {failure.detail}" for failure in (*self._refused, *puller.failures))
            raise type(error)(f"{error}" + (f"; sources lost: {lost}" if lost else ""), **error.facts)
        if checkpoint is None:
            return
        covered = puller.coverage.target
        copies = disk_copies(self._shells, plan.disk, self._specs, covered)
        put = self._shells.put if self._shells.devices else None
        read_copies(checkpoint, copies, control=self._control, on_bytes=self._count_disk, put=put)
        for piece in plan.disk:
            tensor = self._target.by_name[piece.tensor]
            self._from_disk.add(self._target.flat_region(tensor))
            covered.add_region(self._flat(tensor, piece.runtime))

    def _flat(self, tensor: TensorEntry, region: Region) -> Region:
        """A region of a tensor's storage, in elements, as flat bytes."""
        return region.in_bytes(tensor.itemsize).shifted(self._target.storage_bases[tensor.storage])

    def _fill_constants(self, tensor: TensorEntry, covered: IntervalSet) -> None:
        """Padding and the like, where no source gave it along with the rest of an identical tensor."""
        for constant in tensor.constants:
            region = self._flat(tensor, constant.runtime)
            if not covered.covers_region(region):
                self._shells.fill_constant(tensor.name, constant)
                covered.add_region(region)

    def _count_disk(self, nbytes: int) -> None:
        with self._lock:
            before = self._progress
            # A strided piece of which a part is there already is read whole, and counted once.
            bytes_disk = min(before.bytes_disk + nbytes, before.bytes_total - before.bytes_peer)
            self._progress = replace(before, bytes_disk=bytes_disk)
            self._on_progress(self._progress)

    def _verify(self, puller: Puller) -> None:
        """Count the coverage, and compare each tensor's digest that no chunk digest has proven already."""
        covered = puller.coverage.target
        uncertain = entangled(self._target)
        owners: dict[Region, str] = {}
        for tensor in self._target.tensors:
            self._control.check()
            region = self._target.flat_region(tensor)
            self._fill_constants(tensor, covered)
            if not covered.covers_region(region):
                raise missing_tensors([tensor.name])
            held = self._promise(tensor)
            if held is not None and (tensor.name in uncertain or not self._is_proven(tensor, held, puller)):
                self._compare(tensor, held)
            if region in self._from_disk and tensor.name in self._published:
                owner = owners.setdefault(region, tensor.name)
                if owner != tensor.name:
                    self._compare_on_disk(tensor.name, owner)

    def _compare_on_disk(self, name: str, owner: str) -> None:
        """Check that a tensor on disk is the one whose memory it shares here."""
        region = self._target.flat_region(self._target.by_name[name])
        checkpoint = self._origins.checkpoint
        assert checkpoint is not None
        staging = memoryview(bytearray(min(region.numel, self._target.chunk_bytes)))
        begin = 0
        for views in self._shells.steps(region):
            self._control.check()
            end = begin + sum(map(len, views))
            there = staging[: end - begin]
            checkpoint.read_into(name, begin, end, there)
            begin = end
            if b"".join(views) != there:
                raise IntegrityError(
                    f"tensor {name!r}: tied to {owner!r} on the target, but they differ on disk", tensor=name
                )

    def _promise(self, tensor: TensorEntry) -> Manifest | None:
        """The manifest whose digest this tensor has to have, if a source published one."""
        for endpoint in self._endpoints:
            manifest = self._origins.manifests[endpoint.manifest]
            held = manifest.by_name.get(tensor.name)
            if held is not None and held.digest and holds_the_same((self._target, tensor), (manifest, held)):
                return manifest
        return None

    def _is_proven(self, tensor: TensorEntry, held: Manifest, puller: Puller) -> bool:
        proven = puller.coverage.proven.get(held.digest)
        if self._target.flat_region(tensor) in self._from_disk or proven is None:
            return False
        region = held.flat_region(held.by_name[tensor.name])
        return region.is_contiguous and proven.covers(region.offset, region.end)

    def _compare(self, tensor: TensorEntry, held: Manifest) -> None:
        promised, actual = held.by_name[tensor.name].digest, self._shells.digest(tensor.name)
        if promised != actual:
            on_disk = self._target.flat_region(tensor) in self._from_disk
            origin = "from disk, or in part so," if on_disk else "from its sources"
            raise IntegrityError(
                f"tensor {tensor.name!r}: its bytes {origin} hash to {actual}, the manifest "
                f"{held.digest[:16]}… promises {promised}",
                tensor=tensor.name,
            )

    def _result(self, plan: Plan, puller: Puller, *, seconds: tuple[float, float, float]) -> FillResult:
        regions = (self._target.flat_region(tensor) for tensor in self._target.tensors)
        ways = Counter(
            "disk" if region in self._from_disk else way.way for region, way in zip(regions, plan.ways, strict=True)
        )
        return FillResult(
            seconds=seconds[0],
            seconds_peer=seconds[1],
            seconds_disk=seconds[2],
            tensors={way: ways[way] for way in ("identical", "reshard", "disk", "constant")},
            bytes_peer=puller.coverage.bytes_by_source.total(),
            bytes_disk=self._progress.bytes_disk,
            sources=_given(puller),
            failures=(*self._refused, *puller.failures),
            bytes_received=puller.bytes_received,
        )

    def _count_peer(self, nbytes: int) -> None:
        with self._lock:
            before = self._progress
            # A strided tensor whose source is lost in the middle comes twice, and is counted once.
            bytes_peer = min(before.bytes_peer + nbytes, before.bytes_total - before.bytes_disk)
            self._progress = replace(before, bytes_peer=bytes_peer)
            self._on_progress(self._progress)
            self._on_sources(_given(self._puller))

    def _report(self, *, state: TransferState) -> None:
        with self._lock:
            self._progress = replace(self._progress, state=state)
            self._on_progress(self._progress)


def _given(puller: Puller) -> tuple[SourceBytes, ...]:
    return tuple(
        SourceBytes(instance_id=instance_id, rank=rank, nbytes=nbytes)
        for (instance_id, rank), nbytes in puller.coverage.given.items()
    )
