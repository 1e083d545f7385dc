"""Index files: which shard holds which tensor, as a stranger's JSON says."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from weightwire.transfer.checkpoint.regular_files import printable, read_bytes
from weightwire.transfer.checkpoint.untrusted_json import parse_object, quoted
from weightwire.transfer.errors import CheckpointError, CheckpointPathError

# An index has some hundred bytes for each tensor; the largest published ones stay under 20 MB.
_MAX_INDEX_BYTES = 100_000_000


def read_index(path: Path, *, suffix: str) -> dict[str, PurePosixPath]:
    """For each tensor that the index names, its shard, relative to the index's folder and inside it.

    All paths are checked, by their text, before any is looked for on disk: a link inside is its owner's business
    (L19).

    Args:
        path: The index.
        suffix: Of the files that it may name, as `.safetensors`.

    Raises:
        CheckpointPathError: If it names something outside the folder.
        CheckpointError: If it cannot be read, or is no index of such files.
    """
    subject = f"index {printable(path)!r}"
    members = parse_object(read_bytes(path, max_bytes=_MAX_INDEX_BYTES), subject=subject)
    weight_map = members.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{subject}: weight_map is {quoted(weight_map)}, expected names and their files")
    return {name: _inside(value, subject=subject, tensor=name, suffix=suffix) for name, value in weight_map.items()}


def _inside(value: object, *, subject: str, tensor: str, suffix: str) -> PurePosixPath:
    reason = _outside(value)
    if reason is None and isinstance(value, str):
        relative = PurePosixPath(value)
        if relative.suffix == suffix:
            return relative
        raise CheckpointError(f"{subject}: tensor {quoted(tensor)} is in {quoted(value)}, expected *{suffix}")
    raise CheckpointPathError(
        f"{subject}: tensor {quoted(tensor)} is in {quoted(value)}, which {reason}; expected a file inside the folder",
        tensor=tensor.encode("utf-8", "backslashreplace").decode("utf-8"),
    )


def _outside(value: object) -> str | None:
    """Why an index must not name `value`, or None."""
    if not isinstance(value, str):
        return "is not a string"
    if "\0" in value:
        return "has a NUL byte"
    if "\\" in value:
        return "has a backslash"
    if any("\ud800" <= character <= "\udfff" for character in value):
        return "has half of a surrogate pair"
    if PurePosixPath(value).is_absolute():
        return "is absolute"
    return "climbs out with '..'" if ".." in PurePosixPath(value).parts else None
