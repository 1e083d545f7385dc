"""One load: every pair of a stream brought to its end, the names and the slots accounted for.

Two ways lead there and give the same shells (L79). The *model-owned* loop resolves each name in the tables of the whole
model. The *central* one walks the tree, and modules with fused parameters resolve the names below themselves. A load
chooses its way, so that architectures can move from one to the other one at a time (L78).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from weightwire.transfer.errors import NamesError
from weightwire.transfer.loading.drops import is_foreign_final_norm, is_within, layer_of
from weightwire.transfer.loading.halves import check_halves, forget_halves
from weightwire.transfer.loading.landing import Landing, land_all
from weightwire.transfer.loading.ledger import SlotLedger, required_slots
from weightwire.transfer.loading.module_shells import shells_of
from weightwire.transfer.loading.outcomes import LoadReport, NameOutcome, Outcome, unexpected_names
from weightwire.transfer.loading.resolver import NameTables, Query, Resolver
from weightwire.transfer.loading.ties import FilledMemory
from weightwire.transfer.loading.walker import EVERYTHING, Pair, WalkRules, walk

_LOG = logging.getLogger(__name__)

UnexpectedPolicy: TypeAlias = Literal["refuse", "warn"]


@runtime_checkable
class Described(Protocol):
    """A tree that knows the names of its checkpoints."""

    @property
    def tables(self) -> NameTables: ...

    def resolver(self) -> Resolver: ...


def load_weights(
    model: nn.Module,
    pairs: Iterable[Pair],
    *,
    central: bool = False,
    unexpected: UnexpectedPolicy = "refuse",
    rules: WalkRules | None = None,
) -> LoadReport:
    """Fill every shell of a model from a stream of checkpoint tensors, each used in its turn and not kept.

    Args:
        model: A tree of ours, or, by the central way, any module whose names are the checkpoint's.
        pairs: Checkpoint names and whole tensors, in any order.
        central: Whether to walk the tree instead of asking the model's tables.
        unexpected: What to make of names without a place: an error at the end, or a warning.
        rules: What a walk leaves out; by default what the tree's tables say, or nothing but rotary caches.

    Raises:
        PlacementError: If a tensor does not fit its shell.
        NamesError: If names have no place.
        SlotsError: If a slot was filled by nothing, or more than once, or is given two values under two names.
        ValueError: If the model has no tables, and the way is not the central one.
    """
    shells = shells_of(model)
    ledger = SlotLedger(required_slots(shells))
    forget_halves(shells)
    if central:
        landings = walk_tree(model, pairs, rules)
    elif isinstance(model, Described):
        landings = land_by_tables(model.resolver(), pairs, shells)
    else:
        raise ValueError(f"{type(model).__name__} has no tables of names: load it with central=True")
    report = account(landings, ledger)
    check_report(report, model, unexpected=unexpected)
    check_halves(shells)
    ledger.check()
    return report


def land_by_tables(resolver: Resolver, pairs: Iterable[Pair], shells: Mapping[str, torch.Tensor]) -> Iterator[Landing]:
    """Place each pair where the tables of the whole model say, as it arrives."""
    return (land_all(resolver.resolve_all(name), tensor, shells.__getitem__) for name, tensor in pairs)


def account(landings: Iterable[Landing], ledger: SlotLedger) -> LoadReport:
    """Bring a stream to its end and enter each landing into the books."""
    outcomes, also = list[NameOutcome](), set[str]()
    for landing in landings:
        outcomes.append(landing.outcome)
        if landing.outcome.target is not None:
            ledger.record(landing.outcome.target, landing.filled)
        for target, slots in landing.also:
            ledger.record(target, slots)
            also.add(target)
    return LoadReport(outcomes=tuple(outcomes), also_loaded=frozenset(also))


def check_report(report: LoadReport, model: nn.Module, *, unexpected: UnexpectedPolicy) -> None:
    """Say what is to be said about names without a place.

    Raises:
        NamesError: Unless the policy is to warn.
    """
    if not report.unexpected:
        return
    error = _names_error(report, model)
    if unexpected == "refuse":
        raise error
    _LOG.warning("%s", error)


def _names_error(report: LoadReport, model: nn.Module) -> NamesError:
    hint = model.resolver().hint(report.unexpected) if isinstance(model, Described) else ""
    biases = [
        outcome.name
        for outcome in report.outcomes
        if outcome.outcome is Outcome.UNEXPECTED and outcome.rule in ("L55", "L76") and outcome.name.endswith(".bias")
    ]
    if biases:
        hint += f"; the model has no {biases[0]!r}, which could be left out only if it were all zeros"
    return unexpected_names(report.unexpected, hint=hint)


def walk_tree(model: nn.Module, pairs: Iterable[Pair], rules: WalkRules | None = None) -> Iterator[Landing]:
    """Walk a model; a tree of ours after its own renames and drops (L71, L73, L77).

    Args:
        model: Root of the tree.
        pairs: Checkpoint names and whole tensors, in any order.
        rules: What is left out; by default what the tree's tables say, or nothing but rotary caches.

    Yields:
        One landing for each pair, in order, under the checkpoint's name.
    """
    if not isinstance(model, Described):
        yield from walk(model, pairs, rules or EVERYTHING)
        return
    resolver, rules, filled = model.resolver(), rules or walk_rules(model), FilledMemory()
    named = ((resolver.whole_name(name), tensor) for name, tensor in pairs)
    for is_query, group in groupby(named, key=lambda pair: isinstance(pair[0], Query)):
        if is_query:
            found = _walk_renamed(group, lambda pairs: walk(model, pairs, rules, filled=filled))
            yield from (_last_word(landing, resolver) for landing in found)
        else:
            yield from (Landing(outcome=ended) for ended, _ in group if isinstance(ended, NameOutcome))


def _walk_renamed(
    pairs: Iterable[tuple[Query | NameOutcome, torch.Tensor]], walked: Callable[[Iterable[Pair]], Iterable[Landing]]
) -> Iterator[Landing]:
    sources = dict[str, str]()

    def renamed() -> Iterator[Pair]:
        for query, tensor in pairs:
            assert isinstance(query, Query)
            if query.name != query.source:
                sources[query.name] = query.source
            yield query.name, tensor

    for landing in walked(renamed()):
        source = sources.get(landing.outcome.name)
        yield landing if source is None else replace(landing, outcome=replace(landing.outcome, name=source))


def _last_word(landing: Landing, resolver: Resolver) -> Landing:
    """The whole model's tables drop some names for which no module is there to be asked: scales, an indexer's."""
    if landing.outcome.outcome not in (Outcome.UNEXPECTED, Outcome.SKIPPED_OPTIONAL):
        return landing
    decided = resolver.resolve(landing.outcome.name)
    return Landing(outcome=decided) if decided.outcome is Outcome.DROPPED else landing


def walk_rules(model: Described) -> WalkRules:
    """What the tables of a tree say about whole names, for a walk."""
    tables = model.tables
    embedding = f"{tables.embedding}.weight"
    heads = [found.target for found in model.resolver().resolve_all(embedding) if found.rule == "L77" and found.target]
    return WalkRules(
        skip_substrs=tables.skip_substrings,
        ignore_unexpected_suffixes=tables.optional_suffixes,
        also=dict.fromkeys([embedding], heads[0]) if heads else {},
        drop_rule=lambda name: _rule_against(name, tables, needs_embedding=bool(heads)),
    )


def _rule_against(name: str, tables: NameTables, *, needs_embedding: bool) -> str | None:
    """The rule by which a name is left out before its place is looked for: unwanted, or another pipeline stage's."""
    if any(is_within(name, path) for path in tables.skip_prefixes):
        return "L76"
    if tables.tied and is_within(name, tables.head):
        return "L77"
    if is_foreign_final_norm(name, tables.final_norm, owned=tables.owns_final_norm):
        return "L69"
    layer = layer_of(name, tables.decoder)
    foreign_layer = layer is not None and layer < tables.num_layers and layer not in tables.layers
    foreign_head = not tables.owns_head and is_within(name, tables.head)
    foreign_embedding = not tables.owns_embedding and not needs_embedding and is_within(name, tables.embedding)
    return "L68" if foreign_layer or foreign_head or foreign_embedding else None
