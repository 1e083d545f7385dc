"""The shells that a target fills: the caller's own, those of ranks of a topology, or tensors by checkpoint name.

What a model is like (its config.json, and names and shapes of its checkpoint) the local checkpoint says, or else a
source: it has published both along with what it holds, whatever its own topology is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weightwire.service.client.pulls import PullRequest
from weightwire.transfer.admission import check_memory
from weightwire.transfer.agreement import check_same_specs
from weightwire.transfer.checkpoint.specs import specs_of
from weightwire.transfer.control import Control
from weightwire.transfer.errors import ConfigError, NotFoundError
from weightwire.transfer.layouts import ModelIdentity, extended_layout, plain_layout
from weightwire.transfer.manifest import CheckpointSpec, Manifest, Topology
from weightwire.transfer.models import ParameterTree, parse_config
from weightwire.transfer.models.registry import plan_memory
from weightwire.transfer.shells import Shells
from weightwire.transfer.tree_shells import build_rank

logger = logging.getLogger(__name__)

_OPAQUE_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShells:
    """What one rank fills.

    Attributes:
        tree: What the shells are the memory of, if they were built for a topology.
    """

    rank: int
    shells: Shells
    tree: ParameterTree | None = None


def check_locally(request: PullRequest, ranks: Sequence[int]) -> None:
    """Check what the local checkpoint alone tells before anybody is asked: that the model can be laid out so, and fits.

    Raises:
        ConfigError: If the checkpoint's config describes no model that can be built.
        TopologyError: If the model cannot be laid out so.
        AdmissionError: If the ranks do not fit into memory together.
    """
    checkpoint = request.checkpoint
    if request.topology is not None and checkpoint is not None and checkpoint.config is not None:
        _check_fits(request, request.topology, ranks, checkpoint.config)


def prepare_shells(
    request: PullRequest, ranks: Sequence[int], manifests: Sequence[Manifest], control: Control
) -> list[RankShells]:
    """Allocate what the ranks fill, if the caller has not.

    Args:
        request: What is asked for.
        ranks: Of this process.
        manifests: Of the sources, best first.
        control: Looked at between ranks.

    Raises:
        NotFoundError: If neither a source nor the local checkpoint says which tensors there are.
        ManifestMismatchError: If the local checkpoint is another one than the sources'.
        ConfigError: If a topology is asked for, and nobody has a config, or none that describes a known model.
        TopologyError: If the model cannot be laid out so.
        AdmissionError: If all of it together does not fit into memory; nothing is allocated then.
        LoadError: If checkpoint and shells do not go together.
    """
    if request.shells is not None:
        return [RankShells(rank=request.shells.manifest.rank, shells=request.shells)]
    identity = define_model(request, manifests)
    if request.checkpoint is not None or request.topology is not None:
        _check_one_checkpoint(request, identity.checkpoint, manifests)
    if request.topology is None:
        return [RankShells(rank=0, shells=_allocate_plain(request, identity, manifests))]
    return _build_ranks(request, ranks, replace(identity, topology=request.topology), control)


def define_model(request: PullRequest, manifests: Sequence[Manifest]) -> ModelIdentity:
    """What the target's shells are a copy of, as far as the local checkpoint and the sources tell."""
    checkpoint = request.checkpoint
    known = next((held for held in manifests if held.config is not None and held.checkpoint), None)
    known = known or next(iter(manifests), None)
    # A source's first, though they are the same: it tells them in an order that may be another, and a relay whose
    # manifest is the source's own shares the work with it.
    specs = known.checkpoint if known else ()
    return ModelIdentity(
        model=request.model,
        revision=request.wanted_revision or (known.revision if known else ""),
        config=(checkpoint.config if checkpoint else None) or (known.config if known else None),
        checkpoint=specs or (specs_of(checkpoint) if checkpoint else ()),
    )


def _check_one_checkpoint(request: PullRequest, specs: Sequence[CheckpointSpec], manifests: Sequence[Manifest]) -> None:
    """Check that the local checkpoint and those that the sources were loaded from have the same tensors."""
    ours = specs_of(request.checkpoint) if request.checkpoint else specs
    for manifest in manifests:
        # Nearly always they are equal, and there is nothing to compare name by name.
        if manifest.checkpoint and manifest.checkpoint != ours:
            check_same_specs(ours, manifest.checkpoint)


def _allocate_plain(request: PullRequest, identity: ModelIdentity, manifests: Sequence[Manifest]) -> Shells:
    """Every tensor that a plain source or the checkpoint knows of, whole."""
    base = next((held for held in manifests if _is_plain(held)), None)
    if base is not None:
        layout = extended_layout(base, identity.checkpoint or base.checkpoint)
    else:
        _check_specs_known(identity)
        layout = plain_layout(identity.checkpoint, identity)
    check_memory(layout.total_bytes, purpose=f"shells of {request.model!r}")
    return Shells.allocate(layout).through(request.staging)


def _is_plain(manifest: Manifest) -> bool:
    """Whether it is the layout of one rank by checkpoint names; of what is not placed names are all that is known."""
    if manifest.topology != Topology():
        return False
    return all(tensor.name in manifest.whole for tensor in manifest.tensors if tensor.is_placed)


def _build_ranks(
    request: PullRequest, ranks: Sequence[int], identity: ModelIdentity, control: Control
) -> list[RankShells]:
    if identity.config is None:
        raise ConfigError(
            f"model {request.model!r}: neither the local checkpoint nor a source has its config.json, expected one "
            f"that names the architecture, for {identity.topology}"
        )
    _check_specs_known(identity)
    _check_fits(request, identity.topology, ranks, identity.config)
    built = []
    # One after the other: what torch makes new tensors of is a setting of the whole process.
    for rank in ranks:
        control.check()
        tree, found = build_rank(replace(identity, rank=rank), request.build, unexpected=request.unexpected)
        _tell_opaque(rank, found.opaque)
        shells = Shells.from_layout(found.layout).through(request.staging)
        built.append(RankShells(rank=rank, shells=shells, tree=tree))
    return built


def _check_fits(request: PullRequest, topology: Topology, ranks: Sequence[int], config: str) -> None:
    model = parse_config(config)
    needed = sum(plan_memory(model, topology, rank, request.build).shells_bytes for rank in ranks)
    check_memory(needed, purpose=f"shells of {request.model!r}, ranks {list(ranks)} of {topology}")


def _check_specs_known(identity: ModelIdentity) -> None:
    if not identity.checkpoint:
        raise NotFoundError(
            f"model {identity.model!r}: no source says which tensors its checkpoint has, expected it of one, or a "
            "local checkpoint",
            kind="checkpoint",
            name=identity.model,
        )


def _tell_opaque(rank: int, opaque: Mapping[str, str]) -> None:
    if not opaque:
        return
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(opaque.items())[:_OPAQUE_NAMED])
    logger.warning("rank %d: what lies in %d of its tensors cannot be told: %s", rank, len(opaque), shown)
