"""What can be asked for as a load format, what follows from it, and which loader serves it.

Later stages ask the table, not the format's name: files in `raw` state have checkpoint names and global shapes,
`placed` ones runtime names and a rank's own shapes, `final` ones were post-processed as well (L10).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from weightwire.transfer.errors import SettingsError

if TYPE_CHECKING:
    import torch

Container: TypeAlias = Literal["safetensors", "pickle"]


class LoadFormat(StrEnum):
    """Every name that is recognised; `FORMATS` says which of them are served."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    PT = "pt"
    NPCACHE = "npcache"
    MISTRAL = "mistral"
    FASTSAFETENSORS = "fastsafetensors"
    INSTANTTENSOR = "instanttensor"
    RUNAI_STREAMER = "runai_streamer"
    BITSANDBYTES = "bitsandbytes"
    GGUF = "gguf"
    DUMMY = "dummy"
    LAYERED = "layered"
    SHARDED_STATE = "sharded_state"
    PRESHARDED = "presharded"
    EXPERT_PACK = "expert_pack"
    REMOTE = "remote"
    REMOTE_INSTANCE = "remote_instance"
    IPC_CACHE = "ipc_cache"


class LayoutState(StrEnum):
    """How far the tensors of a format are on their way into a shell."""

    RAW = "raw"
    PLACED = "placed"
    FINAL = "final"
    DECLARED = "declared"


class NameStep(StrEnum):
    """What becomes of the names in the files."""

    MAPPED = "mapped"
    OWN_TABLE = "mapped by the format's own table"
    EXPERT_SLOT = "mapped to expert slots alone"
    KEPT = "kept"
    DECLARED = "as declared"


class CutStep(StrEnum):
    """Whether tensors are cut to a rank's piece."""

    CUT = "cut"
    WHOLE = "whole"
    DECLARED = "as declared"


class FinishStep(StrEnum):
    """When post-processing runs."""

    AFTER = "after"
    PER_MODULE = "per module"
    BEFORE_COPY = "on the empty shells, before the copy"
    NEVER = "never"
    DECLARED = "as declared"


class LoaderKind(StrEnum):
    """Which loader reads; the value of all but the first five is the name of a format with a loader of its own."""

    DEFAULT = "default"
    DUMMY = "dummy"
    CLASS = "class"
    INC = "inc"
    MODELOPT = "modelopt"
    BITSANDBYTES = "bitsandbytes"
    GGUF = "gguf"
    LAYERED = "layered"
    RUNAI_STREAMER = "runai_streamer"
    SHARDED_STATE = "sharded_state"
    PRESHARDED = "presharded"
    EXPERT_PACK = "expert_pack"
    REMOTE = "remote"
    REMOTE_INSTANCE = "remote_instance"
    IPC_CACHE = "ipc_cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTraits:
    """What follows from a format.

    Attributes:
        bytes_from: Where its bytes come from.
        state: See `LayoutState`.
        names: See `NameStep`.
        cut: See `CutStep`.
        finish: See `FinishStep`.
        patterns: File name patterns, tried in this order; the first that matches wins.
        canonical: File name up to the shard number, without which several sets of shards are ambiguous.
        loader: Who reads it, if neither a class nor a quantisation decides.
        owns_transport: Whether it moves bytes itself, so that no quantisation's loader may stand in for it.
        is_served: Whether weightwire loads it today.
    """

    bytes_from: str
    state: LayoutState = LayoutState.RAW
    names: NameStep = NameStep.MAPPED
    cut: CutStep = CutStep.CUT
    finish: FinishStep = FinishStep.AFTER
    patterns: tuple[str, ...] = ()
    canonical: str = "model"
    loader: LoaderKind = LoaderKind.DEFAULT
    owns_transport: bool = False
    is_served: bool = False


_SAFETENSORS = ("*.safetensors",)
_AUTO = ("*.safetensors", "*.bin")

FORMATS: Mapping[LoadFormat, FormatTraits] = MappingProxyType(
    {
        LoadFormat.AUTO: FormatTraits(bytes_from="local files", patterns=_AUTO, is_served=True),
        LoadFormat.SAFETENSORS: FormatTraits(bytes_from="local files", patterns=_SAFETENSORS, is_served=True),
        LoadFormat.PT: FormatTraits(bytes_from="local files", patterns=("*.pt",), is_served=True),
        LoadFormat.NPCACHE: FormatTraits(bytes_from="local files", patterns=("*.bin",), is_served=True),
        LoadFormat.MISTRAL: FormatTraits(
            bytes_from="local files",
            patterns=("consolidated*.safetensors",),
            canonical="consolidated",
            is_served=True,
        ),
        LoadFormat.FASTSAFETENSORS: FormatTraits(bytes_from="reads direct to the device", patterns=_SAFETENSORS),
        LoadFormat.INSTANTTENSOR: FormatTraits(bytes_from="reads of a whole group", patterns=_SAFETENSORS),
        LoadFormat.RUNAI_STREAMER: FormatTraits(
            bytes_from="an object store",
            patterns=_SAFETENSORS,
            loader=LoaderKind.RUNAI_STREAMER,
            owns_transport=True,
        ),
        LoadFormat.BITSANDBYTES: FormatTraits(
            bytes_from="quantised files", names=NameStep.OWN_TABLE, loader=LoaderKind.BITSANDBYTES
        ),
        LoadFormat.GGUF: FormatTraits(bytes_from="quantised files", names=NameStep.OWN_TABLE, loader=LoaderKind.GGUF),
        LoadFormat.DUMMY: FormatTraits(
            bytes_from="no bytes: small random values",
            state=LayoutState.PLACED,
            names=NameStep.KEPT,
            cut=CutStep.WHOLE,
            loader=LoaderKind.DUMMY,
            is_served=True,
        ),
        LoadFormat.LAYERED: FormatTraits(
            bytes_from="local files, module by module",
            finish=FinishStep.PER_MODULE,
            patterns=_AUTO,
            loader=LoaderKind.LAYERED,
        ),
        LoadFormat.SHARDED_STATE: FormatTraits(
            bytes_from="files cut for one topology",
            state=LayoutState.FINAL,
            names=NameStep.KEPT,
            cut=CutStep.WHOLE,
            finish=FinishStep.BEFORE_COPY,
            loader=LoaderKind.SHARDED_STATE,
        ),
        LoadFormat.PRESHARDED: FormatTraits(
            bytes_from="files cut for one topology",
            state=LayoutState.FINAL,
            names=NameStep.KEPT,
            cut=CutStep.WHOLE,
            finish=FinishStep.BEFORE_COPY,
            loader=LoaderKind.PRESHARDED,
        ),
        LoadFormat.EXPERT_PACK: FormatTraits(
            bytes_from="a store of single experts",
            state=LayoutState.FINAL,
            names=NameStep.EXPERT_SLOT,
            cut=CutStep.WHOLE,
            finish=FinishStep.NEVER,
            loader=LoaderKind.EXPERT_PACK,
        ),
        LoadFormat.REMOTE: FormatTraits(
            bytes_from="a connector",
            state=LayoutState.DECLARED,
            names=NameStep.DECLARED,
            cut=CutStep.DECLARED,
            finish=FinishStep.DECLARED,
            loader=LoaderKind.REMOTE,
        ),
        LoadFormat.REMOTE_INSTANCE: FormatTraits(
            bytes_from="another running instance",
            state=LayoutState.DECLARED,
            names=NameStep.DECLARED,
            cut=CutStep.DECLARED,
            finish=FinishStep.DECLARED,
            loader=LoaderKind.REMOTE_INSTANCE,
            owns_transport=True,
        ),
        LoadFormat.IPC_CACHE: FormatTraits(
            bytes_from="another process on the same device",
            state=LayoutState.FINAL,
            names=NameStep.KEPT,
            cut=CutStep.WHOLE,
            finish=FinishStep.NEVER,
            loader=LoaderKind.IPC_CACHE,
        ),
    }
)
SERVED = tuple(name for name, traits in FORMATS.items() if traits.is_served)
_SERVED_KINDS = (LoaderKind.DEFAULT, LoaderKind.DUMMY, LoaderKind.CLASS)
FALLBACK_PATTERN = "*.pt"


def recognised_format(name: str) -> LoadFormat:
    """The format of that name, served or not.

    Raises:
        SettingsError: If there is none, listing those that are served.
    """
    try:
        return LoadFormat(name)
    except ValueError as error:
        raise _unserved(f"load format {name[:100]!r}: is unknown") from error


def served_format(name: str) -> LoadFormat:
    """The format of that name. To be asked where options are read, before any file is touched (L09).

    Raises:
        SettingsError: If it is unknown, or recognised and not served; the message lists those that are.
    """
    found = recognised_format(name)
    if not FORMATS[found].is_served:
        raise _unserved(f"load format {found.value!r}: is recognised but not served")
    return found


def _unserved(what: str) -> SettingsError:
    served = [load_format.value for load_format in SERVED]
    return SettingsError(f"{what}, expected one of the load formats {', '.join(served)}", served=served)


def patterns_of(
    load_format: LoadFormat, *, allow_pt_fallback: bool = False, override: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """File name patterns in the order in which they are tried.

    Args:
        load_format: Served or not.
        allow_pt_fallback: Append `*.pt`, and never `*.bin`.
        override: Replaces all of the others, the fallback included.
    """
    if override is not None:
        return override
    own = FORMATS[load_format].patterns
    return (*own, FALLBACK_PATTERN) if allow_pt_fallback and FALLBACK_PATTERN not in own else own


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How a checkpoint is quantised, or will be.

    Attributes:
        method: Name, such as `modelopt_fp4`.
        is_online: Whether the checkpoint is not quantised, and is to be while it is loaded.
    """

    method: str
    is_online: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """What the default loader can be told; None: the user did not say, so that other options may decide (L44).

    Attributes:
        enable_multithread_load: Parse several files at the same time.
        num_threads: How many.
        enable_gds: Read from disk to the device without the host (fastsafetensors alone).
    """

    enable_multithread_load: bool | None = None
    num_threads: int | None = None
    enable_gds: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, object], load_format: LoadFormat = LoadFormat.AUTO) -> ReaderOptions:
        """Options as a user wrote them.

        Raises:
            SettingsError: Naming the key, if it is unknown here or its value is of another kind.
        """
        is_fast = load_format is LoadFormat.FASTSAFETENSORS
        known = ("enable_multithread_load", "num_threads", *(("enable_gds",) if is_fast else ()))
        for key in options:
            if key not in known:
                raise SettingsError(
                    f"reader option {key!r}: is unknown to load format {load_format.value!r}, "
                    f"expected one of {', '.join(known)}",
                    option=key,
                )
        return cls(
            enable_multithread_load=_flag(options, "enable_multithread_load"),
            num_threads=_count(options, "num_threads"),
            enable_gds=_flag(options, "enable_gds") or False,
        )


def _flag(options: Mapping[str, object], key: str) -> bool | None:
    value = options.get(key)
    if value is not None and not isinstance(value, bool):
        raise SettingsError(f"reader option {key!r}: is {value!r}, expected true or false", option=key)
    return value


def _count(options: Mapping[str, object], key: str) -> int | None:
    value = options.get(key)
    if value is None:
        return None
    # A bool is an int to Python, and nobody's number of threads.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"reader option {key!r}: is {value!r}, expected a number of at least 1", option=key)
    return value


class CustomLoader(Protocol):
    """A reader that an embedding program or a test passes as a class; it is built from the load configuration."""

    def __init__(self, config: LoadConfig) -> None: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint names and tensors, one pair at a time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How weights are to be loaded.

    Attributes:
        load_format: A format, or a class of the embedding program's own.
        reader: Options of the default loader.
        quantization: Of the checkpoint, or to be done while loading; None if there is none.
    """

    load_format: LoadFormat | type[CustomLoader] = LoadFormat.AUTO
    reader: ReaderOptions = field(default_factory=ReaderOptions)
    quantization: Quantization | None = None

    @classmethod
    def parse(
        cls,
        load_format: str,
        *,
        reader: Mapping[str, object] = MappingProxyType({}),
        quantization: Quantization | None = None,
    ) -> LoadConfig:
        """The configuration as text tells it; no text can name a class to run (L08). No file is touched.

        Raises:
            SettingsError: If the format, the loader that the quantisation needs, or an option is not served.
        """
        served = served_format(load_format)
        kind = dispatch(served, quantization)
        if kind not in _SERVED_KINDS and quantization is not None:
            raise _unserved(
                f"quantisation {quantization.method!r}: needs the loader {kind.value!r}, which is not served"
            )
        return cls(load_format=served, reader=ReaderOptions.parse(reader, served), quantization=quantization)

    @property
    def kind(self) -> LoaderKind:
        return dispatch(self.load_format, self.quantization)


_MODELOPT = ("modelopt_fp8", "modelopt_fp4", "modelopt_mixed")


def dispatch(load_format: str | type[CustomLoader], quantization: Quantization | None = None) -> LoaderKind:
    """Which loader reads; the first of L07 that applies.

    A checkpoint that becomes `modelopt_fp4` only while it is loaded is an ordinary one on disk, so there its format
    decides.

    Args:
        load_format: A format, served or not, or a class.
        quantization: See `LoadConfig`.

    Raises:
        SettingsError: If no format has that name.
    """
    if isinstance(load_format, type):
        return LoaderKind.CLASS
    found = recognised_format(load_format)
    traits = FORMATS[found]
    if found is LoadFormat.DUMMY or quantization is None:
        return traits.loader
    if quantization.method == "auto-round-int8":
        return LoaderKind.INC
    is_plain_on_disk = quantization.is_online and quantization.method == "modelopt_fp4"
    if quantization.method in _MODELOPT and not is_plain_on_disk and not traits.owns_transport:
        return LoaderKind.MODELOPT
    return traits.loader


def build_custom_loader(config: LoadConfig) -> CustomLoader:
    """An instance of the class that was passed as the format.

    Raises:
        ValueError: If the configuration names a format instead.
    """
    if not isinstance(config.load_format, type):
        raise ValueError(f"load format {config.load_format.value!r} is a name, not a class")
    return config.load_format(config)
