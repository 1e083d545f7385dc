"""The order in which a tensor of the DeepSeek family finds its place: `deepseek_steps`, one readable table (L119).

The family's checkpoints hold what others do not: a layer behind the last one that drafts tokens, shared experts, a
latent attention whose first projections are one, and an indexer. Each has its own question, and the order matters: a
rename may hide a name from the questions behind it, and is asked only after those that need the old name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from weightwire.transfer.loading.drops import DECODER, is_within, layer_of
from weightwire.transfer.loading.halves import SCALE_LEAF, scale_slot
from weightwire.transfer.loading.resolver import PASS, Outcomes, Query, Resolver, Step
from weightwire.transfer.loading.stacked import StackedRow, StackedTable

INDEXER_PARTS = StackedTable(
    (StackedRow("wk_weights_proj", "wk", "wk"), StackedRow("wk_weights_proj", "weights_proj", "weights_proj"))
)
LATENT_PARTS = StackedTable(
    (
        StackedRow("fused_qkv_a_proj_with_mqa", "q_a_proj", 0),
        StackedRow("fused_qkv_a_proj_with_mqa", "kv_a_proj_with_mqa", 1),
    )
)
# Whatever stands around the language model, and what a checkpoint of the base model alone leaves out.
_SPELLINGS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language.lm_head.": "lm_head.",
    "layers.": f"{DECODER}.",
    "embed_tokens.": "model.embed_tokens.",
    "norm.": "model.norm.",
}
_DRAFT_SPELLINGS = ("model.mtp.layers.", "mtp.layers.")
# Of the draft layer: what is not part of its decoder layer, and what it has from its target.
DRAFT_PARTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
BORROWED_PARTS = ("shared_head.head", "embed_tokens")
_SHARED = re.compile(r"(^|\.)mlp\.shared_experts\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekNames:
    """What the questions need to know about a model.

    Attributes:
        num_layers: Layers of the main model; a checkpoint with one alone may be that of a draft.
        num_draft_layers: Layers behind them.
        role: Whose shells are filled.
        num_routed: Routed experts, as the checkpoint numbers them; None for a model without.
        fuses_shared: Whether the shared expert poses as routed expert number `num_routed`.
    """

    num_layers: int
    num_draft_layers: int
    role: Literal["main", "draft"]
    num_routed: int | None = None
    fuses_shared: bool = False
    _spellings: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        drafts = {
            f"{prefix}{number}.": f"{DECODER}.{self.draft_layer + number}."
            for prefix in _DRAFT_SPELLINGS
            for number in range(self.num_draft_layers)
        }
        object.__setattr__(self, "_spellings", {**_SPELLINGS, **drafts})

    @property
    def draft_layer(self) -> int:
        """Number of the draft layer in the checkpoint (L123)."""
        return 0 if self.num_layers == 1 else self.num_layers

    def spell(self, _: Resolver, query: Query) -> Outcomes | Query:
        """The longest prefix counts, and one rename may lead to the next: `language_model.model.mtp.layers.0.`."""
        name = query.name
        for _round in range(2):
            found = max((old for old in self._spellings if name.startswith(old)), key=len, default=None)
            if found is None:
                break
            name = self._spellings[found] + name.removeprefix(found)
        return PASS if name == query.name else query.renamed(name)

    def shared_expert(self, _: Resolver, query: Query) -> Outcomes | Query:
        """The shared expert follows the routed ones (L120)."""
        if not self.fuses_shared:
            return PASS
        name = _SHARED.sub(rf"\1mlp.experts.{self.num_routed}.", query.name, count=1)
        return PASS if name == query.name else query.renamed(name)

    def draft(self, _: Resolver, query: Query) -> Outcomes | Query:
        """Of the checkpoint the draft layer alone, without what it shares with its target (L123, L124)."""
        if self.role != "draft":
            return PASS
        prefix = f"{DECODER}.{self.draft_layer}."
        if not query.name.startswith(prefix):
            return query.drops("L123")
        rest = query.name.removeprefix(prefix)
        if any(is_within(rest, part) for part in BORROWED_PARTS):
            return query.drops("L124")
        is_own = any(is_within(rest, part) for part in DRAFT_PARTS)
        return query.renamed(f"model.{rest}" if is_own else f"model.decoder.{rest}")

    def draft_of_others(self, _: Resolver, query: Query) -> Outcomes:
        """The main model has no use for the draft's layer (L122)."""
        layer = layer_of(query.name)
        is_beyond = self.role == "main" and layer is not None and layer >= self.num_layers
        return query.drops("L122") if self.num_draft_layers and is_beyond else PASS


Question: TypeAlias = Callable[[Resolver, Query], Outcomes | Query]

_BEFORE: tuple[Question, ...] = (Resolver.mapped_away, Resolver.unwanted)
_SCALES: tuple[Question, ...] = (Resolver.kv_scale, Resolver.block_scale)


def deepseek_steps(names: DeepseekNames) -> tuple[Step, ...]:
    """The table. The index of a step in it is its number in the rule; the first with an answer ends a name.

    Number 2 decides no name: whether a worker places the tensor, or the reader's thread, is for the hand-off to say
    (`hand_off.belongs_in_pool`).
    """
    # What is asked, the fact that decides, rules of the outcomes, the question; and whether it is about whole names.
    rows: tuple[tuple[str, str, str, Question, bool], ...] = (
        ("spelling of the prefix", "spellings", "L72 L76", _first(*_BEFORE, names.spell), True),
        ("input scale of an expert, without a shell", "expert table, shells", "L119", _expert_input_scale, False),
        ("by a worker or at once", "where the tensor lies", "", _no_name, False),
        ("layer of another stage", "layer number, stage", "L68", _other_layer, False),
        ("shared expert posing as routed", "fusion of shared experts", "", names.shared_expert, True),
        ("draft role: its own layer alone", "role", "L123 L124", names.draft, True),
        ("main role: the draft's layer", "role, layer number", "L122", names.draft_of_others, True),
        ("matrices of all experts", "shells", "L125", _all_experts, False),
        ("rotary cache", "nothing", "L66", Resolver.rotary_cache, False),
        ("indexer that is not here", "shells", "L67", Resolver.foreign_indexer, False),
        ("part of the fused indexer", "shells", "L127", _indexer_part, False),
        ("part of a fused projection", "stacked rows, shells", "L54 L55 L83", Resolver.stacked, False),
        ("matrix of an expert", "expert number and placement, shells", "L59 L62 L63 L55 L83", Resolver.expert, False),
        ("special names", "shells", "L82 L83 L130 L55", _first(*_SCALES, _latent_part), False),
        ("no shell", "shells, stage", "L77 L91 L68 L69 L82 L55 L70", _without_shell, False),
        ("the shell's own loader", "shells", "L91 L72", Resolver.own_name, False),
    )
    return tuple(
        Step(about=about, needs=needs, rules=tuple(rules.split()), decide=decide, is_whole=is_whole)
        for about, needs, rules, decide, is_whole in rows
    )


def _first(*questions: Question) -> Question:
    """Several questions in one step."""

    def decide(resolver: Resolver, query: Query) -> Outcomes | Query:
        return next((found for question in questions if (found := question(resolver, query))), PASS)

    return decide


def _no_name(_resolver: Resolver, _query: Query) -> Outcomes:
    return PASS


def _expert_input_scale(resolver: Resolver, query: Query) -> Outcomes:
    table = resolver.tables.experts
    found = table.match(query.name) if table and query.name.endswith(".input_scale") else None
    return PASS if found is None or resolver.has_shell(found[0]) else query.drops("L119")


def _other_layer(resolver: Resolver, query: Query) -> Outcomes:
    tables = resolver.tables
    layer = layer_of(query.name, tables.decoder)
    is_foreign = layer is not None and layer < tables.num_layers and layer not in tables.layers
    return query.drops("L68") if is_foreign else PASS


def _all_experts(resolver: Resolver, query: Query) -> Outcomes:
    table = resolver.tables.experts
    found = table.match(query.name) if table else None
    # Without such a shell the name goes on.
    return PASS if found is None or found[1] is not None or not resolver.has_shell(found[0]) else resolver.expert(query)


def _indexer_part(resolver: Resolver, query: Query) -> Outcomes:
    """`wk` and `weights_proj` lie in one shell, if the model has it; a scale is another slot of that shell (L127)."""
    found = INDEXER_PARTS.match(query.name) if ".indexer." in f".{query.name}" else None
    if found is None or resolver.has_shell(query.name):
        return PASS
    path, _, leaf = found[0].rpartition(".")
    target = f"{path}.weight"
    if not resolver.has_shell(target) or leaf not in ("weight", "weight_scale", SCALE_LEAF):
        return PASS
    return query.places("L127", target, found[1] if leaf == "weight" else scale_slot(str(found[1])))


def _latent_part(resolver: Resolver, query: Query) -> Outcomes:
    return resolver.parts_step(query, LATENT_PARTS, rule="L130")


def _without_shell(resolver: Resolver, query: Query) -> Outcomes:
    if tied := resolver.tied_head(query):
        return tied
    if resolver.has_shell(query.name):
        return PASS
    questions = (
        resolver.other_stage,
        resolver.foreign_final_norm,
        resolver.scale_without_shell,
        resolver.optional,
        resolver.unknown,
    )
    return next(found for question in questions if (found := question(query)))
