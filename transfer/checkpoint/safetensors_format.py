"""The safetensors file format, without any file: bytes in, a checked header out, and back.

    8 bytes        header length H, unsigned, little-endian
    H bytes        JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}
    the rest       data section; offsets count from its first byte

What is accepted here, the safetensors library accepts too; a few things that it lets pass are refused: a name
that occurs twice, sizes that torch cannot hold, a last dimension that ends inside a packed element, and the dtypes
that torch lacks. Data need not be aligned.
Source: safetensors 0.8, README "Format" and `SafeTensors::read_metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from weightwire.transfer.checkpoint.untrusted_json import parse_object, quoted
from weightwire.transfer.dtypes import Dtype, dtype_tagged
from weightwire.transfer.errors import DtypeError, HeaderError

PREFIX_BYTES = 8
# Source: safetensors 0.8, `MAX_HEADER_SIZE`.
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
# Sizes, strides and offsets are int64 in torch.
_MAX_TENSOR_BYTES = 2**63 - 1
# What people take for safetensors files, by the bytes that stand where the header length should be.
_LOOKALIKES = (
    (b"version ", "looks like a Git LFS pointer, fetch the real file with `git lfs pull`"),
    (b"PK\x03\x04", "looks like a zip archive, as torch.save writes for .bin and .pt"),
    (b"\x80", "looks like a pickle"),
    (b"GGUF", "looks like a GGUF file"),
    (b"<", "looks like an HTML or XML page"),
    (b"\x1f\x8b", "looks like a gzip archive"),
    (b"{", "looks like JSON without a length before it"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderEntry:
    """One tensor of a file.

    Attributes:
        name: Checkpoint name.
        dtype: Its dtype.
        shape: In torch elements (packed dtypes: not the logical values that the file's JSON counts).
        begin: First byte, counted from the start of the data section.
        end: One past the last byte.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header that has been checked: its entries tile the data section without hole or overlap.

    Attributes:
        entries: In the order of the file's JSON.
        metadata: The `__metadata__` member; empty if the file has none.
        data_begin: Byte of the file at which the data section begins.
        by_name: The same entries by name.
    """

    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]
    data_begin: int
    by_name: Mapping[str, HeaderEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        object.__setattr__(self, "by_name", MappingProxyType({entry.name: entry for entry in self.entries}))

    @property
    def data_bytes(self) -> int:
        """Length of the data section."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return self.data_begin + self.data_bytes


def parse_prefix(prefix: bytes, file_bytes: int, where: str, *, max_header_bytes: int = MAX_HEADER_BYTES) -> int:
    """Header length that the first bytes of a file claim, once that claim is credible.

    Args:
        prefix: The first `PREFIX_BYTES` bytes of the file, or as many as there are.
        file_bytes: Length of the whole file.
        where: Subject of error messages: `file '/m/a.safetensors'`.
        max_header_bytes: Refuse longer headers, before anybody allocates one.

    Raises:
        HeaderError: If the file is too short, or the claim is above the limit or beyond the end of the file.
    """
    if len(prefix) < PREFIX_BYTES or file_bytes < PREFIX_BYTES:
        size = "empty" if file_bytes == 0 else f"{file_bytes} bytes long"
        raise HeaderError(
            f"{where}: is {size}, expected a safetensors file, which begins with 8 bytes of header length; "
            "download it again",
            where=where,
            file_bytes=file_bytes,
        )
    claimed = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if claimed > max_header_bytes:
        reason = f"expected at most {max_header_bytes}"
    elif claimed > file_bytes - PREFIX_BYTES:
        reason = "so it ends inside its header; download it again"
    else:
        return claimed
    hint = next((f"; {text}" for magic, text in _LOOKALIKES if prefix.startswith(magic)), "")
    raise HeaderError(
        f"{where}: claims a header of {claimed} bytes in a file of {file_bytes} bytes, {reason}{hint}",
        where=where,
        claimed_bytes=claimed,
        file_bytes=file_bytes,
    )


def parse_header(raw: bytes, *, file_bytes: int, where: str) -> Header:
    """Check a header against itself and against the length of the file.

    Args:
        raw: The header's JSON, without the eight bytes before it.
        file_bytes: Length of the whole file, prefix and data included.
        where: Subject of error messages: `file '/m/a.safetensors'`.

    Raises:
        HeaderError: If anything is malformed, or entries overlap, leave a hole, or do not end where the file ends.
        DtypeError: If a dtype's tag is unknown, or a shape ends inside a packed element.
    """
    members = parse_object(raw, subject=f"{where}: header", refusal=HeaderError)
    metadata = _read_metadata(members.pop(METADATA_KEY, None), where)
    entries = tuple(_read_entry(name, value, where) for name, value in members.items())
    header = Header(entries=entries, metadata=metadata, data_begin=PREFIX_BYTES + len(raw))
    _check_tiles(header, where)
    _check_length(header, file_bytes, where)
    return header


def build_header(
    entries: Iterable[tuple[str, Dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """Lay out a file: everything that goes before the data section, and where each tensor's bytes go in it.

    Args:
        entries: Name, dtype and shape in torch elements. Their bytes must follow the prefix in this order.
        metadata: The `__metadata__` member. Transformers refuses files without `{"format": "pt"}`.

    Returns:
        The first `header.data_begin` bytes of the file (a multiple of eight), and the header.

    Raises:
        HeaderError: If a file cannot hold these names, shapes or metadata.
        DtypeError: If a packed dtype has no dimension that it can be packed along.
    """
    where = "safetensors file to write"
    laid_out = _lay_out(entries, where)
    members: dict[str, object] = {METADATA_KEY: _read_metadata(dict(metadata), where)} if metadata else {}
    for entry in laid_out:
        shape = list(entry.dtype.logical_shape(entry.shape))
        members[entry.name] = {"dtype": entry.dtype.tag, "shape": shape, "data_offsets": [entry.begin, entry.end]}
    raw = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % PREFIX_BYTES)
    if len(raw) > MAX_HEADER_BYTES:
        raise HeaderError(f"{where}: header takes {len(raw)} bytes, expected at most {MAX_HEADER_BYTES}")
    header = Header(entries=laid_out, metadata=metadata or {}, data_begin=PREFIX_BYTES + len(raw))
    return len(raw).to_bytes(PREFIX_BYTES, "little") + raw, header


def _lay_out(entries: Iterable[tuple[str, Dtype, tuple[int, ...]]], where: str) -> tuple[HeaderEntry, ...]:
    laid_out, seen, cursor = list[HeaderEntry](), set[str](), 0
    for name, dtype, shape in entries:
        subject = f"{where}: tensor {quoted(name)}"
        if name == METADATA_KEY or name in seen:
            raise HeaderError(f"{subject}: name is {'taken twice' if name in seen else 'reserved by the format'}")
        seen.add(name)
        _check_text(name, subject)
        if dtype.packing > 1 and not shape:
            raise DtypeError(f"{subject}: shape is [], expected a dimension to pack {dtype.name} along")
        end = cursor + _count_bytes(_read_shape(list(shape), subject), dtype, subject)
        laid_out.append(HeaderEntry(name=name, dtype=dtype, shape=tuple(shape), begin=cursor, end=end))
        cursor = end
    return tuple(laid_out)


def _read_metadata(value: object, where: str) -> dict[str, str]:
    """Absent, null and `{}` all occur in published files and mean the same."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HeaderError(f"{where}: {METADATA_KEY} is {quoted(value)}, expected an object of strings")
    metadata = dict[str, str]()
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise HeaderError(f"{where}: {METADATA_KEY} member {quoted(key)} is {quoted(text)}, expected a string")
        _check_text(key, f"{where}: {METADATA_KEY}")
        _check_text(text, f"{where}: {METADATA_KEY} member {quoted(key)}")
        metadata[key] = text
    return metadata


def _read_entry(name: str, value: object, where: str) -> HeaderEntry:
    subject = f"{where}: tensor {quoted(name)}"
    _check_text(name, subject)
    if not isinstance(value, dict):
        raise HeaderError(f"{subject}: is {quoted(value)}, expected an object with dtype, shape and data_offsets")
    dtype = _read_dtype(value.get("dtype"), subject)
    logical = _read_shape(value.get("shape"), subject)
    try:
        shape = dtype.element_shape(logical)
    except DtypeError as error:
        raise DtypeError(f"{subject}: {error}", **error.facts) from error
    begin, end = _read_offsets(value.get("data_offsets"), subject)
    expected = _count_bytes(shape, dtype, subject)
    if end - begin != expected:
        raise HeaderError(
            f"{subject}: data_offsets [{begin}, {end}] span {end - begin} bytes, "
            f"expected {expected} for {dtype.tag} of shape {quoted(list(logical))}",
            where=where,
            tensor=name,
            expected_bytes=expected,
            actual_bytes=end - begin,
        )
    return HeaderEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end)


def _read_dtype(tag: object, subject: str) -> Dtype:
    if not isinstance(tag, str):
        raise HeaderError(f"{subject}: dtype is {quoted(tag)}, expected a string")
    try:
        return dtype_tagged(tag)
    except DtypeError as error:
        raise DtypeError(f"{subject}: dtype tag {quoted(tag)} is unknown here", dtype=quoted(tag)) from error


def _read_shape(value: object, subject: str) -> tuple[int, ...]:
    sizes = _integers(value)
    if sizes is None:
        raise HeaderError(f"{subject}: shape is {quoted(value)}, expected a list of integers of at least 0")
    return sizes


def _read_offsets(value: object, subject: str) -> tuple[int, int]:
    offsets = _integers(value)
    if offsets is None or len(offsets) != 2:
        raise HeaderError(f"{subject}: data_offsets is {quoted(value)}, expected two integers of at least 0")
    begin, end = offsets
    if begin > end:
        raise HeaderError(f"{subject}: data_offsets is [{begin}, {end}], expected the end not before the begin")
    return begin, end


def _integers(value: object) -> tuple[int, ...] | None:
    # `type(...) is int` and not isinstance: JSON's true would pass for 1.
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def _count_bytes(shape: tuple[int, ...], dtype: Dtype, subject: str) -> int:
    """Bytes of a tensor; refuses what overflows even where a zero elsewhere in the shape would hide it."""
    extent = dtype.itemsize
    for size in shape:
        extent *= max(size, 1)
        if extent > _MAX_TENSOR_BYTES:
            raise HeaderError(f"{subject}: shape {quoted(list(shape))} of {dtype.tag} overflows 63 bits")
    return 0 if 0 in shape else extent


def is_tensor_name(text: str) -> bool:
    """Whether a file of this format can hold a tensor of that name."""
    try:
        _check_text(text, METADATA_KEY)
    except HeaderError:
        return False
    return text != METADATA_KEY


def _check_text(text: str, subject: str) -> None:
    """Refuse lone surrogates, which JSON escapes can make and UTF-8 cannot carry any further."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise HeaderError(f"{subject}: {quoted(text)} is not Unicode text: {error.reason}") from error


def _check_tiles(header: Header, where: str) -> None:
    cursor, previous = 0, "the data section begins"
    for entry in sorted(header.entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != cursor:
            fault = "leaves a hole" if entry.begin > cursor else "overlaps"
            raise HeaderError(
                f"{where}: tensor {quoted(entry.name)} {fault}: begins at byte {entry.begin} of the data section, "
                f"expected {cursor}, where {previous}",
                where=where,
                tensor=entry.name,
            )
        cursor, previous = entry.end, f"tensor {quoted(entry.name)} ends"


def _check_length(header: Header, file_bytes: int, where: str) -> None:
    """Refuse a payload that is shorter or longer than the entries, which tile it, say."""
    actual, expected = file_bytes - header.data_begin, header.data_bytes
    if actual == expected:
        return
    if actual > expected:
        culprit = max(header.entries, key=lambda entry: entry.end, default=None)
        fault = f"ends the data section at byte {expected}, but {actual} bytes are there"
    else:
        cut = (entry for entry in header.entries if entry.end > actual)
        culprit = min(cut, key=lambda entry: entry.begin, default=None)
        there = max(actual - culprit.begin, 0) if culprit else 0
        fault = f"takes {culprit.nbytes if culprit else 0} bytes, but only {there} are there"
    subject = f"tensor {quoted(culprit.name)}" if culprit else "a header without tensors"
    raise HeaderError(
        f"{where}: {subject} {fault}: the file has {file_bytes} bytes, expected {header.file_bytes}; download it again",
        where=where,
        tensor=culprit.name if culprit else None,
        expected_bytes=header.file_bytes,
        actual_bytes=file_bytes,
    )
