"""One decision for each checkpoint name: which slot of which shell, or why none.

The model description is data (`NameTables`), the decision a fixed list of steps: `STEPS`, at the end of this file, or
those that the model's tables bring along.
A name is decided before its payload is touched, so a reader asks `Resolver.wants` what to fetch.
"""

from __future__ import annotations

import difflib
import heapq
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from weightwire.transfer.errors import ConfigError
from weightwire.transfer.loading.drops import (
    DECODER,
    indexer_owners,
    is_foreign_final_norm,
    is_foreign_indexer,
    is_rotary_cache,
    is_within,
    layer_of,
)
from weightwire.transfer.loading.expert_names import ExpertTable
from weightwire.transfer.loading.mappers import WeightsMapper
from weightwire.transfer.loading.outcomes import NameOutcome, Outcome
from weightwire.transfer.loading.scale_names import block_scale_target, is_kv_scale, kv_scale_targets
from weightwire.transfer.loading.slots import ExpertPart, SlotId
from weightwire.transfer.loading.stacked import OPTIONAL_SUFFIXES, STANDARD_TABLE, StackedTable
from weightwire.transfer.ranks import ExpertPlacement

logger = logging.getLogger(__name__)

_NEAREST = 3
_CANDIDATES = 32
_HINTED = 3
# Where the configuration of a multi-modal model keeps that of its language model.
_LANGUAGE_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTables:
    """What a model's names mean, on one pipeline stage.

    Paths of modules end at whole components: `model.norm` is not the beginning of `model.norms`.

    Attributes:
        stacked: Parts of fused shells.
        experts: Names of routed experts, if there are any.
        decoder: Path of the list of layers.
        layers: Numbers of this stage's layers.
        num_layers: Layers of the whole model; a layer beyond them is unknown, not another stage's.
        final_norm: Path of the norm after the last layer.
        embedding: Path of the input embedding.
        head: Path of the output head.
        owns_embedding: Whether this stage has the embedding; likewise `owns_final_norm` and `owns_head`.
        tied: Whether the head has the embedding's values.
        mapper: Renames, applied once and first.
        optional_suffixes: Ends of names that may lack a shell, if the values allow it.
        skip_prefixes: Paths that nobody here wants.
        skip_substrings: Text in names that nobody here wants.
        global_expert_tensors: Ends of runtime names of experts' shells that hold the values of all experts.
        further_parts: Parts of fused shells that a step of their own knows.
        steps: The questions asked about a name, in order; None for `STEPS`.
    """

    layers: range
    num_layers: int
    stacked: StackedTable = STANDARD_TABLE
    experts: ExpertTable | None = None
    decoder: str = DECODER
    final_norm: str = "model.norm"
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    owns_embedding: bool = True
    owns_final_norm: bool = True
    owns_head: bool = True
    tied: bool = False
    mapper: WeightsMapper = field(default_factory=WeightsMapper)
    optional_suffixes: tuple[str, ...] = OPTIONAL_SUFFIXES
    skip_prefixes: tuple[str, ...] = ()
    skip_substrings: tuple[str, ...] = ()
    global_expert_tensors: tuple[str, ...] = ()
    further_parts: tuple[StackedTable, ...] = ()
    steps: tuple[Step, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One name on its way through the steps.

    Attributes:
        source: As the checkpoint has it.
        mapped: After the mapper, and after the steps that rename; None if the mapper drops it.
    """

    source: str
    mapped: str | None

    @property
    def name(self) -> str:
        return self.source if self.mapped is None else self.mapped

    def ends(self, outcome: Outcome, rule: str, target: str | None = None, slot: SlotId = None) -> Outcomes:
        return (NameOutcome(name=self.source, outcome=outcome, rule=rule, target=target, slot=slot),)

    def renamed(self, name: str) -> Query:
        return Query(source=self.source, mapped=name)

    def drops(self, rule: str) -> Outcomes:
        return self.ends(Outcome.DROPPED, rule)

    def places(self, rule: str, target: str, slot: SlotId = None) -> Outcomes:
        return self.ends(Outcome.PLACED, rule, target, slot)


# What a step decides; empty if the next one is to be asked.
Outcomes: TypeAlias = tuple[NameOutcome, ...]
PASS: Outcomes = ()


class Resolver:
    """Decides names for one rank.

    Args:
        tables: The model's names.
        shell_names: Every shell of the rank once, under its first name. An alias is not listed: a tied head that is
            the embedding's own object needs nothing, one that is listed is a shell to be filled.
        placement: Which expert lies where; None if this rank holds all experts.
        ep_rank: This rank's place in `placement`.
    """

    __slots__ = ("_indexers", "_local_experts", "_shells", "_steps", "_tables", "_warned")

    def __init__(
        self,
        tables: NameTables,
        shell_names: Iterable[str],
        placement: ExpertPlacement | None = None,
        ep_rank: int = 0,
    ) -> None:
        self._tables = tables
        self._steps = STEPS if tables.steps is None else tables.steps
        # In the order given: nearest names are then the same on every run.
        self._shells: Mapping[str, None] = dict.fromkeys(shell_names)
        self._indexers = indexer_owners(self._shells)
        self._local_experts = None if placement is None else frozenset(placement.ranks[ep_rank])
        self._warned = False

    def resolve(self, name: str) -> NameOutcome:
        """What becomes of a checkpoint tensor; see `resolve_all` for one that fills several shells."""
        return self.resolve_all(name)[0]

    def resolve_all(self, name: str) -> tuple[NameOutcome, ...]:
        """All that becomes of a checkpoint tensor.

        Returns:
            The outcome that counts, and, for a tensor that fills several shells (the embedding of a tied model with a
            separate head, the old `kv_scale`), one more for each of the others.
        """
        return self._decide(name)[1]

    @property
    def tables(self) -> NameTables:
        return self._tables

    @property
    def steps(self) -> tuple[Step, ...]:
        """The questions asked about a name, in order."""
        return self._steps

    def has_shell(self, name: str) -> bool:
        """Whether this rank has a shell of that name."""
        return name in self._shells

    def deciding_step(self, name: str) -> int:
        """Index in `steps` of the step that ends a name."""
        return self._decide(name)[0]

    def whole_name(self, source: str) -> Query | NameOutcome:
        """What the steps that look at whole names make of one, before a walk takes it apart: a rename, or its end."""
        query = self._query(source)
        for step in self._steps:
            found = step.decide(self, query) if step.is_whole else PASS
            if isinstance(found, Query):
                query = found
            elif found:
                return found[0]
        return query

    def wants(self, name: str) -> bool:
        """Whether the payload is needed: to be placed, or because a tensor may be skipped only if it is all zeros."""
        return any(outcome.is_read for outcome in self.resolve_all(name))

    def nearest(self, name: str) -> tuple[str, ...]:
        """The shells whose names are most like the one that `name` leads to, best first; for messages."""
        sought = self.resolve(name).target or name
        parts = sought.split(".")

        def num_shared(shell: str) -> int:
            others = shell.split(".")
            return _num_equal(parts, others) + _num_equal(parts[::-1], others[::-1])

        def likeness(shell: str) -> tuple[int, float]:
            return num_shared(shell), difflib.SequenceMatcher(None, shell, sought).ratio()

        # Comparing letter by letter is slow, and a large model has tens of thousands of shells.
        candidates = heapq.nlargest(_CANDIDATES, self._shells, key=num_shared)
        return tuple(sorted(candidates, key=likeness, reverse=True)[:_NEAREST])

    def hint(self, names: Collection[str]) -> str:
        """End of a message about unexpected names: for the first few of them the nearest shells."""
        found = ((name, self.nearest(name)) for name in list(names)[:_HINTED])
        return "".join(f"; nearest to {name!r}: {', '.join(map(repr, shells))}" for name, shells in found if shells)

    def _decide(self, source: str) -> tuple[int, tuple[NameOutcome, ...]]:
        for index, found in self.trail(source):
            if not isinstance(found, Query):
                return index, found
        raise AssertionError("the last step always answers")

    def trail(self, source: str) -> Iterator[tuple[int, Query | Outcomes]]:
        """Steps that had an answer, by their index in `steps`: renames, and last the one that ends the name."""
        query = self._query(source)
        for index, step in enumerate(self._steps):
            found = step.decide(self, query)
            if isinstance(found, Query):
                query = found
                yield index, found
            elif found:
                yield index, found
                return

    def _query(self, source: str) -> Query:
        return Query(source=source, mapped=self._tables.mapper.apply(source))

    # The questions that `STEPS` asks; tables of other models ask some of them, too.

    def mapped_away(self, query: Query) -> Outcomes:
        return query.drops("L72") if query.mapped is None else PASS

    def unwanted(self, query: Query) -> Outcomes:
        tables = self._tables
        by_path = any(is_within(query.name, prefix) for prefix in tables.skip_prefixes)
        by_text = any(text in query.name for text in tables.skip_substrings)
        return query.drops("L76") if by_path or by_text else PASS

    def tied_head(self, query: Query) -> Outcomes:
        tables, name = self._tables, query.name
        if not tables.tied:
            return PASS
        if is_within(name, tables.head):
            return query.drops("L77")
        if not is_within(name, tables.embedding):
            return PASS
        # A head of its own is filled from the file: the embedding's shell is cut and padded, or on another stage.
        head = tables.head + name.removeprefix(tables.embedding)
        filled = query.places("L91", name) if name in self._shells else PASS
        return filled + (query.places("L77", head) if head in self._shells else PASS)

    def other_stage(self, query: Query) -> Outcomes:
        tables, name = self._tables, query.name
        layer = layer_of(name, tables.decoder)
        foreign_layer = layer is not None and layer < tables.num_layers and layer not in tables.layers
        foreign_embedding = not tables.owns_embedding and is_within(name, tables.embedding)
        foreign_head = not tables.owns_head and is_within(name, tables.head)
        return query.drops("L68") if foreign_layer or foreign_embedding or foreign_head else PASS

    def foreign_final_norm(self, query: Query) -> Outcomes:
        owned = self._tables.owns_final_norm
        return query.drops("L69") if is_foreign_final_norm(query.name, self._tables.final_norm, owned=owned) else PASS

    def own_name(self, query: Query) -> Outcomes:
        if query.name not in self._shells:
            return PASS
        return query.places("L91" if query.name == query.source else "L72", query.name)

    def rotary_cache(self, query: Query) -> Outcomes:
        return query.drops("L66") if is_rotary_cache(query.name) else PASS

    def foreign_indexer(self, query: Query) -> Outcomes:
        return query.drops("L67") if is_foreign_indexer(query.name, self._indexers) else PASS

    def kv_scale(self, query: Query) -> Outcomes:
        targets = kv_scale_targets(query.name, self._shells)
        return tuple(outcome for target in targets for outcome in query.places("L82", target))

    def stacked(self, query: Query) -> Outcomes:
        return self.parts_step(query, self._tables.stacked, rule="L54")

    def parts_step(self, query: Query, table: StackedTable, *, rule: str) -> Outcomes:
        """What the rows of one table make of a name."""
        found = table.dispatch(query.name, self._shells, optional_suffixes=self._tables.optional_suffixes)
        if found.target is None:
            return PASS
        if found.outcome is Outcome.PLACED:
            return query.places(rule, found.target, found.slot)
        if found.outcome is Outcome.SKIPPED_OPTIONAL:
            return query.ends(Outcome.SKIPPED_OPTIONAL, "L55", found.target, found.slot)
        block_scale = block_scale_target(found.target, self._shells)
        return PASS if block_scale is None else query.places("L83", block_scale, found.slot)

    def expert(self, query: Query) -> Outcomes:
        found = self._tables.experts.match(query.name) if self._tables.experts else None
        if found is None:
            return PASS
        named, part = found
        target = named if named in self._shells else block_scale_target(named, self._shells)
        if target is None:
            return self._expert_without_shell(query, named, part)
        if part is None:
            return query.places("L125", target)
        if target.endswith(self._tables.global_expert_tensors):
            return query.places("L63", target, part)
        if not self._is_local(part):
            return query.ends(Outcome.NOT_LOCAL, "L62", target, part)
        return query.places("L59" if target == named else "L83", target, part)

    def _expert_without_shell(self, query: Query, target: str, part: ExpertPart | None) -> Outcomes:
        if not query.name.endswith(self._tables.optional_suffixes):
            return PASS
        if part is not None and not self._is_local(part):
            return query.ends(Outcome.NOT_LOCAL, "L62", target, part)
        return query.ends(Outcome.SKIPPED_OPTIONAL, "L55", target, part)

    def _is_local(self, part: ExpertPart) -> bool:
        return self._local_experts is None or part.expert in self._local_experts

    def block_scale(self, query: Query) -> Outcomes:
        target = block_scale_target(query.name, self._shells)
        return PASS if target is None else query.places("L83", target)

    def scale_without_shell(self, query: Query) -> Outcomes:
        if not is_kv_scale(query.name):
            return PASS
        if not self._warned:
            self._warned = True
            logger.warning(
                "tensor %r: this model has no such scale of the KV cache; dropped, and others like it", query.source
            )
        return query.drops("L82")

    def optional(self, query: Query) -> Outcomes:
        is_optional = query.name.endswith(self._tables.optional_suffixes)
        return query.ends(Outcome.SKIPPED_OPTIONAL, "L55", query.name) if is_optional else PASS

    def unknown(self, query: Query) -> Outcomes:
        experts = self._tables.experts
        found = self._tables.stacked.match(query.name) or (experts.match(query.name) if experts else None)
        target, slot = found or (query.name, None)
        return query.ends(Outcome.UNEXPECTED, "L70", target, slot)


def _num_equal(left: list[str], right: list[str]) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One question about a name.

    Attributes:
        rules: Ids that its outcomes may carry.
        needs: The fact that decides, besides the name.
        decide: The answer: how the name ends, another name to go on with, or nothing.
        about: What is asked, in a few words.
        is_whole: Whether it looks at whole names, which a module below the root does not see, and at no shell.
    """

    rules: tuple[str, ...]
    needs: str
    decide: Callable[[Resolver, Query], Outcomes | Query]
    about: str
    is_whole: bool = False


# The first step with an answer ends the name. What other ranks own goes before what nobody knows; a shell's own name
# before every rename; a rename that finds its shell before one that does not; the last step always answers.
STEPS = (
    Step(rules=("L72",), needs="mapper", decide=Resolver.mapped_away, about="dropped by a rename", is_whole=True),
    Step(rules=("L76",), needs="skip lists", decide=Resolver.unwanted, about="unwanted"),
    Step(rules=("L77", "L91"), needs="tie of head and embedding", decide=Resolver.tied_head, about="tied head"),
    Step(rules=("L68",), needs="layer number, stage", decide=Resolver.other_stage, about="another stage's"),
    Step(rules=("L69",), needs="stage", decide=Resolver.foreign_final_norm, about="another stage's final norm"),
    Step(rules=("L91", "L72"), needs="shells", decide=Resolver.own_name, about="a shell's own name"),
    Step(rules=("L66",), needs="nothing", decide=Resolver.rotary_cache, about="rotary cache"),
    Step(rules=("L67",), needs="shells", decide=Resolver.foreign_indexer, about="indexer that is not here"),
    Step(rules=("L82",), needs="shells", decide=Resolver.kv_scale, about="scale of the KV cache"),
    Step(
        rules=("L54", "L55", "L83"),
        needs="stacked rows, shells",
        decide=Resolver.stacked,
        about="part of a fused projection",
    ),
    Step(
        rules=("L59", "L62", "L63", "L125", "L55", "L83"),
        needs="expert number, expert placement, shells",
        decide=Resolver.expert,
        about="matrix of an expert, or of all of them",
    ),
    Step(rules=("L83",), needs="shells", decide=Resolver.block_scale, about="block scale of another spelling"),
    Step(
        rules=("L82",), needs="shells", decide=Resolver.scale_without_shell, about="scale of a KV cache without scales"
    ),
    Step(rules=("L55",), needs="optional suffixes", decide=Resolver.optional, about="optional, without a shell"),
    Step(rules=("L70",), needs="all of the above", decide=Resolver.unknown, about="unknown"),
)


def is_tied(config: Mapping[str, object], *, default: bool = False) -> bool:
    """Whether the output head has the embedding's values, by a model's `config.json`.

    A multi-modal configuration may say it on several levels; the one nearest to the language model counts, and levels
    that contradict each other are warned about.

    Args:
        config: The parsed file.
        default: What the architecture does if no level says anything.

    Raises:
        ConfigError: If a flag is no boolean, or a level no object.
    """
    level, path, said = config, "", dict[str, bool]()
    while True:
        flag = level.get("tie_word_embeddings")
        if isinstance(flag, bool):
            said[f"{path}tie_word_embeddings"] = flag
        elif flag is not None:
            raise ConfigError(
                f"{path}tie_word_embeddings: is {flag!r}, expected true or false", field=f"{path}tie_word_embeddings"
            )
        key = next((key for key in _LANGUAGE_CONFIGS if level.get(key) is not None), None)
        if key is None:
            break
        inner = level[key]
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{path}{key}: is {type(inner).__name__}, expected an object", field=f"{path}{key}")
        level, path = inner, f"{path}{key}."
    if len(set(said.values())) > 1:
        logger.warning("config.json: %s contradict each other, the last one counts", said)
    return [default, *said.values()][-1]
