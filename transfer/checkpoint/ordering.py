"""In which order files are read, and how ranks are kept from asking for the same file at once.

    -1      the order of the listing, as it came
    0       sorted
    k > 0   sorted, then rotated: in groups of `tp x k` files, rank r begins k x r files later

Rotation never drops or repeats a file (L28). It pays on storage that ranks share over a network: at any one time it
spreads them over at most `tp` files that lie `k` apart, and in a short last group two ranks may begin with the same
file. On a local disk it brings nothing or costs, so it is off unless asked for (L30).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from weightwire.transfer.diagnostics import Diagnostic
from weightwire.transfer.errors import SettingsError
from weightwire.transfer.ranks import ALONE, GroupRank

AS_LISTED = -1
SORTED = 0

File = TypeVar("File", str, Path)


def check_order(mode: int, group: GroupRank = ALONE, *, unique_names: bool) -> None:
    """Refuse an order that could decide which bytes are loaded.

    Args:
        mode: See the module.
        group: The ranks that share the storage, and this one's place among them.
        unique_names: Whether no tensor name can come from two of the files: it was looked up (`names_in_several`), or
            the reader refuses such files.

    Raises:
        SettingsError: If there is no such mode, or ranks or runs could keep different copies of a tensor (L29).
    """
    if mode < AS_LISTED:
        raise SettingsError(
            f"sort_files: is {mode}, expected -1 (as listed), 0 (sorted) or the step of a rotation", sort_files=mode
        )
    if mode != SORTED and not unique_names and (mode == AS_LISTED or group.size > 1):
        what = "the listing's order" if mode == AS_LISTED else f"staggering over {group.size} ranks"
        raise SettingsError(
            f"sort_files: is {mode}, and names may be in two files: {what} would decide which copy is loaded; "
            "expected unique names, or sort_files 0",
            sort_files=mode,
        )


def order_files(files: Iterable[File], mode: int, group: GroupRank = ALONE, *, unique_names: bool) -> tuple[File, ...]:
    """The files in reading order: each of them once, for every rank.

    Args:
        files: As they were listed.
        mode: See the module.
        group: The ranks that share the storage, and this one's place among them.
        unique_names: See `check_order`.

    Raises:
        SettingsError: See `check_order`.
    """
    check_order(mode, group, unique_names=unique_names)
    if mode == AS_LISTED:
        return tuple(files)
    ordered = sorted(files)
    if mode == SORTED or group.size == 1:
        return tuple(ordered)
    size = group.size * mode
    groups = (ordered[begin : begin + size] for begin in range(0, len(ordered), size))
    return tuple(file for members in groups for file in _rotated(members, group.rank * mode))


def _rotated(members: Sequence[File], by: int) -> Iterable[File]:
    return (members[(index + by) % len(members)] for index in range(len(members)))


def names_in_several(names: Mapping[File, Collection[str]]) -> dict[str, list[File]]:
    """The tensor names that are in more than one file, and these files; empty if staggering is harmless.

    Args:
        names: Tensor names by file.
    """
    holders = dict[str, list[File]]()
    for file, held in names.items():
        for name in held:
            holders.setdefault(name, []).append(file)
    return {name: files for name, files in holders.items() if len(files) > 1}


def reading_notes(
    subject: str,
    *,
    prefetch: bool,
    multithreaded: bool,
    mmap: bool,
    shared_storage: bool = False,
    sort_files: int = SORTED,
    group: GroupRank = ALONE,
) -> tuple[Diagnostic, ...]:
    """What will cost speed, and never content, in the way that files are about to be read.

    Args:
        subject: What is read, for the message.
        prefetch: Whether another thread warms the page cache.
        multithreaded: Whether several threads parse files.
        mmap: Whether files are mapped, not copied.
        shared_storage: Whether ranks on other machines read the same storage.
        sort_files: See the module.
        group: The ranks that read at the same time.
    """
    found = list[tuple[str, str]]()
    if prefetch and multithreaded and mmap:
        found.append(("D10", "prefetch and several reading threads evict each other's pages"))
    if shared_storage and group.size > 1 and sort_files <= SORTED:
        found.append(("D10", f"{group.size} ranks ask shared storage for the same file at the same time"))
    if not mmap:
        found.append(("D11", "without mmap each process holds bytes of its own, which no other one shares"))
    if sort_files > SORTED and group.size > 1:
        found.append(("D11", f"files are rotated by {sort_files} for each rank: another order, the same content"))
    return tuple(Diagnostic(code=code, subject=subject, detail=detail) for code, detail in found)
