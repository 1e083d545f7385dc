"""A rank's tensors as one safetensors file: each storage region once, under its first name."""

from __future__ import annotations

from dataclasses import dataclass

from weightwire.transfer.checkpoint.safetensors_format import build_header
from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.manifest import Manifest, TensorEntry
from weightwire.transfer.regions import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """How the file is made up: `prefix`, then the row-major bytes of each tensor.

    Attributes:
        prefix: Header with its length in front.
        tensors: In file order, without aliases.
        nbytes: Of the whole file.
    """

    prefix: bytes
    tensors: tuple[TensorEntry, ...]
    nbytes: int


def exported_tensors(manifest: Manifest) -> tuple[tuple[TensorEntry, ...], dict[str, str]]:
    """The tensors to write, and the file's metadata.

    Names that are aliases stand in the metadata: `alias:NAME` -> the name that has the bytes.
    """
    first: dict[tuple[str, tuple[int, ...], Region], str] = {}
    metadata = {"format": "pt"}
    tensors: list[TensorEntry] = []
    for tensor in manifest.tensors:
        # A tensor without elements has no bytes to share; one of another shape cannot be told by a name alone.
        key = (tensor.dtype, tensor.shape, manifest.flat_region(tensor))
        if tensor.nbytes and (owner := first.setdefault(key, tensor.name)) != tensor.name:
            metadata[f"alias:{tensor.name}"] = owner
        else:
            tensors.append(tensor)
    return tuple(tensors), metadata


def export_layout(manifest: Manifest) -> ExportLayout:
    """The file of a rank.

    Raises:
        HeaderError: If a safetensors file cannot hold these names.
    """
    tensors, metadata = exported_tensors(manifest)
    prefix, _ = build_header([(t.name, dtype_named(t.dtype), t.shape) for t in tensors], metadata)
    nbytes = len(prefix) + sum(tensor.nbytes for tensor in tensors)
    return ExportLayout(prefix=prefix, tensors=tensors, nbytes=nbytes)
