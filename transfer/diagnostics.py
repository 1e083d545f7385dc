"""Known failures of loading: what each looks like, in which stage it shows, and what to look at first (L187).

A `Diagnostic` is one failure, or one thing worth saying before there is a failure, about one subject. Errors refer to
the catalogue by their fact `diagnostic`; `diagnostic_of` makes the value out of such an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from weightwire.transfer.errors import (
    AdmissionError,
    CheckpointError,
    CheckpointNotFoundError,
    CoverageError,
    Fact,
    NamesError,
    PlacementError,
    SlotsError,
    TransferError,
)


class Stage(StrEnum):
    """Where a failure shows; a stage reports only failures of its own kind (L188)."""

    DISCOVERY = "discovery"
    DISCOVERY_NAMES = "discovery + names"
    NAMES = "names"
    ITERATION = "iteration"
    ORDERING_MMAP = "ordering + mmap"
    PLACEMENT = "placement"
    PLACEMENT_THREADS = "placement (threads)"
    POST_PROCESSING = "post-processing"
    STARTUP_OVERLAP = "startup overlap"
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """One row of the catalogue.

    Attributes:
        code: `D01` and so on; never reused.
        symptom: What is seen first.
        stage: Where it shows.
        causes: The likely ones, the likeliest first.
        rules: Ids of the rules to look at.
        raised_as: Error classes that may carry the code; none where nothing is raised (a layout that is wrong without
            an exception, or a load that is only slow).
    """

    code: str
    symptom: str
    stage: Stage
    causes: tuple[str, ...]
    rules: tuple[str, ...]
    raised_as: tuple[type[TransferError], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One known failure, met.

    Attributes:
        code: Key of `CATALOGUE`.
        subject: What it is about: a tensor, a file, a rank.
        detail: What was found, in a sentence.
    """

    code: str
    subject: str
    detail: str

    def __post_init__(self) -> None:
        if self.code not in CATALOGUE:
            raise ValueError(f"diagnostic {self.code!r} is not one of {', '.join(CATALOGUE)}")

    @property
    def known(self) -> KnownFailure:
        return CATALOGUE[self.code]

    @property
    def stage(self) -> Stage:
        return self.known.stage


def diagnostic_of(error: TransferError) -> Diagnostic | None:
    """What the catalogue says about an error, by its fact `diagnostic`; None if it says nothing."""
    code = error.facts.get("diagnostic")
    # An error may come from a newer peer, whose catalogue has rows that are unknown here.
    if not isinstance(code, str) or code not in CATALOGUE:
        return None
    return Diagnostic(code=code, subject=subject_of_facts(error.facts), detail=str(error))


def subject_of_facts(facts: Mapping[str, Fact]) -> str:
    """Name, file and rank, as far as an error's facts tell them."""
    parts = list[str]()
    for keys, text in _SUBJECT_FACTS:
        found = next((facts[key] for key in keys if facts.get(key) is not None), None)
        if isinstance(found, list):
            strings = [repr(item) for item in found if isinstance(item, str)]
            more = f" and {len(strings) - _MOST_NAMED} more" if len(strings) > _MOST_NAMED else ""
            found = ", ".join(strings[:_MOST_NAMED]) + more
        elif isinstance(found, str):
            found = repr(found)
        if found is not None and found != "":
            parts.append(f"{text} {found}")
    return ", ".join(parts) or "the load as a whole"


def render(diagnostic: Diagnostic) -> str:
    """Several lines for people: code and stage, subject, what was found, likely causes in order, rules."""
    return f"{advice(diagnostic)}\nfound: {diagnostic.detail}"


def advice(diagnostic: Diagnostic) -> str:
    """`render` without what was found, for whoever has printed that already."""
    known = diagnostic.known
    causes = [f"  {number}. {cause}" for number, cause in enumerate(known.causes, start=1)]
    return "\n".join(
        [
            f"{known.code} [{known.stage}] {known.symptom}",
            f"subject: {diagnostic.subject}",
            "likely causes:",
            *causes,
            f"see: {', '.join(known.rules)} in docs/rules.md",
        ]
    )


_MOST_NAMED = 5
# The first fact of a row that an error has is shown.
_SUBJECT_FACTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("tensor", "name", "slot", "unfilled", "refilled", "unexpected"), "tensor"),
    (("file", "path", "files", "missing"), "file"),
    (("rank",), "rank"),
    (("phase",), "phase"),
)

_ROWS = (
    KnownFailure(
        code="D01",
        symptom="Cannot find any model weights with ...",
        stage=Stage.DISCOVERY,
        causes=(
            "no file matches the patterns that were tried",
            "the format asks for safetensors and the folder has only .bin files",
        ),
        rules=("L13", "L14", "L15", "L24"),
        raised_as=(CheckpointNotFoundError,),
    ),
    KnownFailure(
        code="D02",
        symptom="one name is there twice, or would be: which value is loaded depends on order",
        stage=Stage.DISCOVERY,
        causes=(
            "a merged file lies beside the shards",
            "the index omits a shard (consolidated copies, an MTP shard)",
        ),
        rules=("L16", "L17", "L18", "L19", "L20", "L21", "L22"),
        raised_as=(CheckpointError, SlotsError),
    ),
    KnownFailure(
        code="D03",
        symptom="in the checkpoint, but the shell is never filled",
        stage=Stage.DISCOVERY_NAMES,
        causes=(
            "the tensor's shard is not in the index",
            "the MTP shard was not added",
            "a prefix changed the name",
        ),
        rules=("L05", "L17", "L22", "L49"),
        raised_as=(SlotsError, CoverageError),
    ),
    KnownFailure(
        code="D04",
        symptom="Attempted to load weight (a) into parameter (b)",
        stage=Stage.PLACEMENT,
        causes=(
            "a split parameter has the loader of a whole one (one shape is a multiple of the other)",
            "a size does not divide and no padding was asked for",
        ),
        rules=("L92", "L97", "L116"),
        raised_as=(PlacementError,),
    ),
    KnownFailure(
        code="D05",
        symptom="outputs are NaN or near 0, late in start-up",
        stage=Stage.STARTUP_OVERLAP,
        causes=(
            "sentinel values were not replaced",
            "a float parameter belongs to __init__ and is absent from the file",
        ),
        rules=("L154", "L155", "L156", "L157", "L158", "L159"),
        raised_as=(SlotsError,),
    ),
    KnownFailure(
        code="D06",
        symptom="FP8 start-up drifts from the reference",
        stage=Stage.POST_PROCESSING,
        causes=(
            "block scales of kv_b_proj were merged into one",
            "a UE8M0 byte was read as an integer",
        ),
        rules=("L143", "L144", "L145"),
    ),
    KnownFailure(
        code="D07",
        symptom="an MoE layer differs from the reference",
        stage=Stage.PLACEMENT,
        causes=(
            "the order of gate and up does not fit the kernel",
            "the padding is not zero",
            "two rules for partition sizes disagree",
        ),
        rules=("L108", "L109", "L110", "L111"),
    ),
    KnownFailure(
        code="D08",
        symptom="some experts are wrong under expert parallelism",
        stage=Stage.PLACEMENT,
        causes=(
            "the map from logical to physical experts",
            "a replica's slot was not written",
            "the shared expert is in the wrong place",
        ),
        rules=("L62", "L63", "L64", "L121"),
    ),
    KnownFailure(
        code="D09",
        symptom="memory of device 0 jumps or overflows",
        stage=Stage.PLACEMENT_THREADS,
        causes=("a worker thread did not set its device, and its copies landed on device 0",),
        rules=("L132",),
    ),
    KnownFailure(
        code="D10",
        symptom="loading is slow, the storage is saturated",
        stage=Stage.ITERATION,
        causes=(
            "prefetch and multi-threaded reads at the same time",
            "no staggering of the ranks on shared storage",
        ),
        rules=("L26", "L27", "L28", "L29", "L30", "L44"),
    ),
    KnownFailure(
        code="D11",
        symptom="same content hash, different speed",
        stage=Stage.ORDERING_MMAP,
        causes=(
            "order and staggering: they never change content, only speed",
            "mmap is off, so processes do not share pages",
        ),
        rules=("L28", "L32", "L33"),
    ),
    KnownFailure(
        code="D12",
        symptom="out of memory",
        stage=Stage.ANY,
        causes=(
            "phase shells: parameters alone take more than there is",
            "phase transfer: buffers above the shells",
            "phase post-process: derived tensors beside their sources",
        ),
        rules=("L85",),
        raised_as=(AdmissionError,),
    ),
    KnownFailure(
        code="D13",
        symptom="half of a pair is left over (a weight without its scale)",
        stage=Stage.NAMES,
        causes=("the counterpart that is named is not in the file that the index gives for it",),
        rules=("L129",),
        raised_as=(NamesError, SlotsError),
    ),
)
CATALOGUE: Mapping[str, KnownFailure] = MappingProxyType({row.code: row for row in _ROWS})
