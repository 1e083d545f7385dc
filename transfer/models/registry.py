"""From a configuration to the tree of its architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from weightwire.transfer.admission import check_memory
from weightwire.transfer.checkpoint.untrusted_json import quoted
from weightwire.transfer.errors import ConfigError
from weightwire.transfer.loading.mappers import QuantisationNames, WeightsMapper, find_remap
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models.blueprint import Blueprint, BuildOptions
from weightwire.transfer.models.building import MemoryAccount, build_defaults, memory_phase, planned_bytes
from weightwire.transfer.models.config import ModelConfig, architecture_of, config_of, read_members
from weightwire.transfer.models.config_fields import Members
from weightwire.transfer.models.decoder import DecoderTree
from weightwire.transfer.ranks import RankPlace

Tree = TypeVar("Tree", bound=type[DecoderTree])

_ARCHITECTURES = dict[str, type[DecoderTree]]()
_ONE_RANK = Topology()
_PLAIN_OPTIONS = BuildOptions()


def registers_architecture(*names: str) -> Callable[[Tree], Tree]:
    """Decorator of a tree: the architectures, by their names in `config.json`, that it is."""

    def register(tree: Tree) -> Tree:
        for name in names:
            if name in _ARCHITECTURES:
                raise ValueError(f"architecture {name!r}: is registered already")
            _ARCHITECTURES[name] = tree
        return tree

    return register


def architectures() -> Mapping[str, type[DecoderTree]]:
    """The trees that can be built, by architecture."""
    return dict(_ARCHITECTURES)


def find_architecture(name: str) -> type[DecoderTree]:
    """Raises:
    ConfigError: If no tree is known for that architecture.
    """
    if name not in _ARCHITECTURES:
        raise ConfigError(
            f"config.json: field 'architectures' is {quoted(name)}, expected one of {sorted(_ARCHITECTURES)} "
            "(or the plain tree, which has no topology)",
            field="architectures",
        )
    return _ARCHITECTURES[name]


def parse_config(source: str | bytes | Members) -> ModelConfig:
    """Read the `config.json` of a model that can be built.

    Args:
        source: The text of the file, or its members.

    Raises:
        ConfigError: If it is not JSON, its architecture is unknown, or a field is missing, of the wrong type or out of
            range: `facts["field"]`.
    """
    members = read_members(source)
    # First of all: the fields of other architectures have other names.
    find_architecture(architecture_of(members))
    return config_of(members)


def build_model(
    config: ModelConfig,
    topology: Topology = _ONE_RANK,
    rank: int = 0,
    options: BuildOptions = _PLAIN_OPTIONS,
) -> DecoderTree:
    """Allocate the shells of one rank, where they will stay (L84, L86).

    Args:
        config: See `parse_config`.
        topology: Of the instance.
        rank: Global rank.
        options: What else can be chosen.

    Returns:
        A tree whose shells are uninitialised memory, and whose wiring has been checked.

    Raises:
        ConfigError: If the architecture is unknown, or the model has parts that it does not have.
        TopologyError: If the model cannot be laid out so.
        AdmissionError: If there is not enough memory; nothing is allocated then.
    """
    tree, blueprint = _plan(config, topology, rank, options)
    if torch.device(options.device).type == "meta":
        return _build(tree, blueprint)
    needed = planned_bytes(lambda: tree(blueprint), dtype=blueprint.dtype).shells_bytes
    if torch.device(options.device).type == "cpu":
        check_memory(needed, purpose=f"the shells of {config.architecture}, rank {rank}")
    with memory_phase("shells", needed_bytes=needed):
        return _build(tree, blueprint)


def plan_memory(
    config: ModelConfig,
    topology: Topology = _ONE_RANK,
    rank: int = 0,
    options: BuildOptions = _PLAIN_OPTIONS,
) -> MemoryAccount:
    """What the shells of one rank take, before anything is allocated (L85); arguments and errors of `build_model`."""
    tree, blueprint = _plan(config, topology, rank, options)
    return planned_bytes(lambda: tree(blueprint), dtype=blueprint.dtype)


def _build(tree: type[DecoderTree], blueprint: Blueprint) -> DecoderTree:
    with build_defaults(blueprint.options.device, blueprint.dtype):
        return tree(blueprint)


def _plan(
    config: ModelConfig, topology: Topology, rank: int, options: BuildOptions
) -> tuple[type[DecoderTree], Blueprint]:
    tree = _tree_of(config, options)
    if config.experts is not None and not tree.has_experts:
        raise ConfigError(
            f"config.json: field 'num_experts' is {config.experts.num_experts}, but {config.architecture} "
            "has no experts",
            field="num_experts",
        )
    blueprint = Blueprint(config=config, place=RankPlace.of(topology, rank), options=options)
    return tree, replace(blueprint, renames=_renames(tree, config))


def _tree_of(config: ModelConfig, options: BuildOptions) -> type[DecoderTree]:
    tree = find_architecture(config.architecture)
    if options.role == "main":
        return tree
    if tree.draft is None or config.num_draft_layers != 1:
        raise ConfigError(
            f"config.json: field 'num_nextn_predict_layers' is {config.num_draft_layers}, expected one layer "
            f"of {config.architecture} that drafts tokens",
            field="num_nextn_predict_layers",
        )
    return tree.draft


def _renames(tree: type[DecoderTree], config: ModelConfig) -> WeightsMapper:
    """Of the architecture (L71) and of its quantisation (L52), before any shell has a name."""
    remap = find_remap(tree)
    renames = WeightsMapper() if remap is None else remap(config)
    if config.fp8 is None:
        return renames
    return renames.merged(QuantisationNames.of(tree, config.source).mapper)
