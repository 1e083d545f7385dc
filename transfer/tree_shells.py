"""The shells of one rank of a topology: how they are laid out, and which checkpoint elements belong into them.

Both come from the parameter tree itself: the layout from its tensors, the placement from a run of its loader without
data. On the meta device that needs a `config.json` and the checkpoint's names and shapes, and no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weightwire.transfer.dtypes import dtype_of
from weightwire.transfer.errors import ConfigError
from weightwire.transfer.layouts import Layout, ModelIdentity
from weightwire.transfer.loading.layout_facts import layout_facts
from weightwire.transfer.loading.loop import UnexpectedPolicy
from weightwire.transfer.loading.slots import attached_loader
from weightwire.transfer.manifest import CheckpointSpec, Manifest, layout_fingerprint
from weightwire.transfer.models import BuildOptions, ParameterTree, build_model, parse_config
from weightwire.transfer.placing import place_shells
from weightwire.transfer.shells import tensors_of
from weightwire.transfer.tracing import Trace, trace_placement

# Whose layout it is; the number goes up when a shell changes without a fact of its own.
_ENGINE = "weightwire-tree-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """A rank's layout, with what its loader does not tell.

    Attributes:
        layout: Of every parameter and persistent buffer, by every name.
        opaque: By runtime name, why it is not known what lies there.
        uncovered: By runtime name, how many elements nothing fills.
    """

    layout: Layout
    opaque: Mapping[str, str]
    uncovered: Mapping[str, int]

    @property
    def manifest(self) -> Manifest:
        return self.layout.manifest


def lay_out_tree(
    tree: ParameterTree,
    specs: Iterable[CheckpointSpec],
    identity: ModelIdentity,
    *,
    unexpected: UnexpectedPolicy = "refuse",
) -> TreeLayout:
    """Trace a tree's loader, and describe its shells.

    Args:
        tree: On any device; its shells keep their bytes.
        specs: Of the whole checkpoint.
        identity: Of the model; topology and rank are the tree's.
        unexpected: What to make of names without a place.

    Raises:
        LoadError: If checkpoint and shells do not go together.
    """
    shells = tensors_of(tree)
    trace = trace_placement(lambda pairs: tree.load_weights(pairs, unexpected=unexpected), shells, specs)
    return describe_tree(tree, trace, identity)


def describe_tree(tree: ParameterTree, trace: Trace, identity: ModelIdentity) -> TreeLayout:
    """The same, where the loader has been traced already.

    Args:
        tree: As traced.
        trace: Of the tree's loader and its shells.
        identity: Of the model, with topology and rank.
    """
    shells = tensors_of(tree)
    placed = place_shells(trace, shells)
    held = tree.state_dict(keep_vars=True)
    layout = Layout.of(shells, identity, placed.placements)
    return TreeLayout(
        layout=layout.described({name: _fingerprint(shell) for name, shell in held.items()}),
        opaque=placed.opaque,
        uncovered=trace.uncovered,
    )


def build_rank(
    identity: ModelIdentity, options: BuildOptions | None = None, *, unexpected: UnexpectedPolicy = "refuse"
) -> tuple[ParameterTree, TreeLayout]:
    """Build the shells of one rank of a model that is known by its `config.json` and its checkpoint's names alone.

    Args:
        identity: With config, checkpoint specs, topology and rank.
        options: How shells are laid out; on which device, too: `meta` needs no memory.
        unexpected: What to make of names without a place.

    Returns:
        The tree, not filled, and its layout.

    Raises:
        ConfigError: If there is no config, or none that describes a known model.
        TopologyError: If the model cannot be laid out so.
        AdmissionError: If it does not fit into memory.
        LoadError: If checkpoint and shells do not go together.
    """
    if identity.config is None:
        raise ConfigError(f"model {identity.model!r}: has no config.json, expected one that names the architecture")
    tree = build_model(parse_config(identity.config), identity.topology, identity.rank, options or BuildOptions())
    return tree, lay_out_tree(tree, identity.checkpoint, identity, unexpected=unexpected)


def _fingerprint(shell: torch.Tensor) -> str:
    return layout_fingerprint(
        engine=_ENGINE,
        dtype=dtype_of(shell).name,
        shape=shell.shape,
        strides=shell.stride(),
        facts=layout_facts(attached_loader(shell)),
    )
