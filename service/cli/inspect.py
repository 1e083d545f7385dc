"""`weightwire inspect`: what a checkpoint folder holds, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from weightwire.service.cli import flags
from weightwire.service.cli.output import human_bytes, print_json, start_logging, stdout
from weightwire.service.cli.topology import chosen_ranks, chosen_topology
from weightwire.transfer.checkpoint import DiscoveryOptions
from weightwire.transfer.checkpoint.formats import served_format
from weightwire.transfer.diagnostics import Diagnostic, advice, render
from weightwire.transfer.explaining import Explanation, explain_names
from weightwire.transfer.inspection import Inspection, inspect_checkpoint
from weightwire.transfer.loading.outcomes import Outcome
from weightwire.transfer.loading.slots import slot_text
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import BuildOptions
from weightwire.transfer.ranks import GroupRank


def inspect(
    checkpoint_dir: Annotated[Path, typer.Argument(help="Folder with a checkpoint, or one file of it.")],
    *,
    load_format: flags.LoadFormatName = "auto",
    pt_fallback: flags.PtFallback = False,
    shared_by: Annotated[
        int, typer.Option(help="Ranks that read this folder from shared storage at the same time.", min=1)
    ] = 1,
    explain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Say which question decides about a checkpoint tensor of that name, and where it goes; repeatable.",
            show_default=False,
        ),
    ] = None,
    tp: flags.Tp = None,
    pp: flags.Pp = None,
    ep: flags.Ep = None,
    rank: flags.Rank = "all",
    role: flags.RoleName = "main",
    fuse_shared_expert: flags.FuseSharedExpert = False,
    json: flags.Json = False,
    log_level: flags.LogLevel = "error",
) -> int:
    """Show which files a load would read, in which order, what is in them, and what is odd about them.

    Reads headers and config.json, and no weights. Of a known architecture it says whether names and shapes fit.
    Topology and role are those of the ranks that --explain is about.
    """
    start_logging(log_level)
    options = DiscoveryOptions(
        load_format=served_format(load_format), allow_pt_fallback=pt_fallback, group=GroupRank(0, shared_by)
    )
    found = inspect_checkpoint(checkpoint_dir, options, shared_storage=shared_by > 1)
    build = BuildOptions(role=flags.chosen_role(role), fuse_shared_expert=fuse_shared_expert)
    topology = chosen_topology(tp=tp, pp=pp, ep=ep) or Topology()
    explained = [
        explanation
        for each in (chosen_ranks(rank, topology) if explain else ())
        for explanation in explain_names(
            checkpoint_dir, explain or (), topology=topology, rank=each, build=build, options=options
        )
    ]
    if json:
        print_json({**_to_json(found), "explained": [_explanation_json(each) for each in explained], "error": None})
    elif explained:
        for each in explained:
            _print_explanation(each)
    else:
        _print(found)
    return 0


def _explanation_json(found: Explanation) -> dict[str, object]:
    first = found.outcomes[0]
    return {
        "name": found.name,
        "is_there": found.is_there,
        "rank": found.rank,
        "renames": [
            {"step": question.number, "about": question.about, "to": question.renamed} for question in found.renames
        ],
        "step": found.decided.number,
        "about": found.decided.about,
        "needs": found.decided.needs,
        "rule": first.rule,
        "outcome": str(first.outcome),
        "targets": [slot_text(each.target, each.slot) for each in found.outcomes if each.target is not None],
        "pieces": list(found.pieces),
        "is_computed": found.is_computed,
    }


def _print_explanation(found: Explanation) -> None:
    first, decided = found.outcomes[0], found.decided
    targets = [slot_text(each.target, each.slot) for each in found.outcomes if each.target is not None]
    lines = [
        f"{found.name}{'' if found.is_there else ' (not in this checkpoint)'}, rank {found.rank}",
        *(f"  step {each.number}, {each.about}: becomes {each.renamed}" for each in found.renames),
        f"  step {decided.number}, {decided.about} (needs {decided.needs}; rule {first.rule}): {first.outcome}",
        *(f"  {'into' if first.outcome is Outcome.PLACED else 'would be'} {target}" for target in targets),
        *(f"  {piece}" for piece in found.pieces),
        *(["  its values are computed from two tensors or more"] if found.is_computed else []),
    ]
    for line in lines:
        stdout.print(line, markup=False, highlight=False, soft_wrap=True)


def _to_json(found: Inspection) -> dict[str, object]:
    return {
        "folder": found.folder,
        "container": found.container,
        "index": found.index,
        "architecture": found.architecture,
        "has_tree": found.has_tree,
        "refusal": found.refusal,
        "revision": found.revision,
        "files": [{"name": file.name, "bytes": file.nbytes, "tensors": file.num_tensors} for file in found.files],
        "tensors": found.num_tensors,
        "bytes": found.nbytes,
        "dtypes": dict(found.dtypes),
        "diagnostics": [_diagnostic_json(diagnostic) for diagnostic in found.diagnostics],
    }


def _diagnostic_json(diagnostic: Diagnostic) -> dict[str, object]:
    return {
        "code": diagnostic.code,
        "stage": str(diagnostic.stage),
        "subject": diagnostic.subject,
        "detail": diagnostic.detail,
        "causes": list(diagnostic.known.causes),
        "rules": list(diagnostic.known.rules),
    }


def _print(found: Inspection) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("file, in reading order", overflow="fold")
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for file in found.files:
        table.add_row(file.name, "?" if file.num_tensors is None else str(file.num_tensors), human_bytes(file.nbytes))
    stdout.print(table, highlight=False)
    tensors = "tensors unknown before loading" if found.num_tensors is None else f"{found.num_tensors} tensors"
    by_dtype = ", ".join(f"{human_bytes(nbytes)} {dtype}" for dtype, nbytes in found.dtypes.items())
    listed = f"listed by {found.index}" if found.index else "without an index"
    tree = "can be cut for --tp/--pp/--ep" if found.has_tree else "loads by checkpoint names, whole"
    count = f"1 {found.container} file" if len(found.files) == 1 else f"{len(found.files)} {found.container} files"
    lines = [
        f"{count} {listed}: {tensors}, {by_dtype or human_bytes(found.nbytes)}",
        f"model: {found.architecture or 'no config.json names one'}, {tree}",
        *([f"a load for a topology would be refused: {found.refusal}"] if found.refusal else []),
        # What the line above has said is not said again.
        *(f"\n{(advice if odd.detail == found.refusal else render)(odd)}" for odd in found.diagnostics),
    ]
    for line in lines:
        stdout.print(line, markup=False, highlight=False, soft_wrap=True)
