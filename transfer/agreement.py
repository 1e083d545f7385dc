"""Whether manifests speak of the same model, and of one tensor alike: checked before a byte of a shell changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightwire.transfer.coverage import count_coverage
from weightwire.transfer.errors import ManifestError, ManifestMismatchError
from weightwire.transfer.manifest import CheckpointSpec, Manifest, TensorEntry
from weightwire.transfer.regions import Region

Conflict = dict[str, str]


def check_agreement(target: Manifest, others: Iterable[Manifest]) -> None:
    """Check that all manifests are of one model and revision, and mean the same where they name one tensor.

    Tensors of two topologies are different things under one name, and are compared by what their placements say.

    Raises:
        ManifestMismatchError: With all conflicts in `facts["conflicts"]`.
    """
    manifests = list(others)
    _check_revisions(target, manifests)
    conflicts = [conflict for other in manifests for conflict in _conflicts(target, other)]
    if conflicts:
        raise mismatch(conflicts)


def check_world(manifests: Sequence[Manifest]) -> None:
    """Check that the manifests of one instance are all of its ranks, once each.

    Raises:
        ManifestMismatchError: If a rank is missing, there twice, or of another model, revision or topology.
    """
    if not manifests:
        return
    first = manifests[0]
    for other in manifests[1:]:
        _check_revisions(first, [other])
        if other.topology != first.topology:
            raise ManifestMismatchError(
                f"model {first.model!r} rank {other.rank}: topology is {other.topology}, {first.topology} on rank "
                f"{first.rank}",
                model=first.model,
                rank=other.rank,
            )
    ranks = Counter(manifest.rank for manifest in manifests)
    for rank in range(first.topology.world_size):
        if ranks[rank] != 1:
            raise ManifestMismatchError(
                f"model {first.model!r} rank {rank}: {ranks[rank]} manifests, expected one for each of the "
                f"{first.topology.world_size} ranks of {first.topology}",
                model=first.model,
                rank=rank,
            )


def check_placement(manifest: Manifest, tensor: TensorEntry) -> None:
    """Check that no element of a tensor is placed twice, and that nothing is placed outside of it.

    Raises:
        ManifestError: If so, naming the tensor.
    """
    if _follow_each_other(tensor):
        return
    regions = [*(piece.runtime for piece in tensor.placement), *(constant.runtime for constant in tensor.constants)]
    found = count_coverage(tensor.region, regions)
    if found.repeated or found.outside:
        what = "placed more than once" if found.repeated else "placed outside of it"
        raise ManifestError(
            f"model {manifest.model!r} rank {manifest.rank} tensor {tensor.name!r}: "
            f"{found.repeated or found.outside} elements are {what}, expected each of its {found.elements} once",
            model=manifest.model,
            rank=manifest.rank,
            tensor=tensor.name,
        )


def missing_elements(tensor: TensorEntry) -> int:
    """How many elements of a tensor have no place in its placement; that none has two is `check_placement`'s to say."""
    placed = sum([piece.pattern.numel for piece in tensor.placement])
    return tensor.region.numel - placed - sum([constant.runtime.numel for constant in tensor.constants])


def holds_the_same(one: tuple[Manifest, TensorEntry], other: tuple[Manifest, TensorEntry]) -> bool:
    """Whether two tensors, each of a manifest, hold the same elements, in the same order, of one model."""
    (manifest, tensor), (another, held) = one, other
    if tensor.dtype != held.dtype or tensor.shape != held.shape or tensor.state != held.state:
        return False
    if tensor.state == "final" and tensor.layout != held.layout:
        # After post-processing the layout alone says which element lies where.
        return False
    if tensor.is_placed and held.is_placed:
        is_whole = tensor.name in manifest.whole
        if is_whole or held.name in another.whole:
            return is_whole and held.name in another.whole
        return tensor.strides == held.strides and _placed_alike(tensor, held)
    # Without a placement on both sides only its rank tells what lies in a tensor.
    return (manifest.topology, manifest.rank) == (another.topology, another.rank)


def disagreement(manifest: Manifest, others: Iterable[Manifest]) -> str | None:
    """Name of a tensor whose digest differs from that in one of the `others`, if there is one.

    A revision names a model's definition, not its values: two trainings of one model may go by one name.
    """
    for other in others:
        for tensor in manifest.tensors:
            held = other.by_name.get(tensor.name)
            if held is None or not (held.digest and tensor.digest) or held.digest == tensor.digest:
                continue
            if holds_the_same((manifest, tensor), (other, held)):
                return tensor.name
    return None


def check_specs(target: Manifest, specs: Mapping[str, CheckpointSpec]) -> None:
    """Check the checkpoint on disk against the one that the target is laid out for, else against its whole tensors.

    Names that only one side knows are no conflict. A target that knows the checkpoint's dtypes may have others itself:
    its loader converts.

    Raises:
        ManifestMismatchError: With all conflicts in `facts["conflicts"]`.
    """
    conflicts: list[Conflict] = []
    wanted: dict[str, TensorEntry | CheckpointSpec] = {name: target.by_name[name] for name in target.whole}
    wanted |= {spec.name: spec for spec in target.checkpoint}
    for name, ours in wanted.items():
        spec = specs.get(name)
        if spec is not None:
            conflicts += _differences(name, (ours.dtype, ours.shape), (spec.dtype, spec.shape))
    if conflicts:
        raise mismatch(conflicts, there="in the checkpoint on disk")


def check_same_specs(ours: Iterable[CheckpointSpec], theirs: Iterable[CheckpointSpec]) -> None:
    """Check that the local checkpoint and the one that a source was loaded from name the same tensors alike.

    Raises:
        ManifestMismatchError: With every tensor that only one side has, or has otherwise.
    """
    local, remote = ({spec.name: spec for spec in specs} for specs in (ours, theirs))
    conflicts: list[Conflict] = []
    for name in dict.fromkeys((*local, *remote)):
        if name in local and name in remote:
            a, b = local[name], remote[name]
            conflicts += _differences(name, (a.dtype, a.shape), (b.dtype, b.shape))
        else:
            there, here = ("absent", "present") if name in local else ("present", "absent")
            conflicts.append({"tensor": name, "field": "name", "source": there, "target": here})
    if conflicts:
        raise mismatch(conflicts)


def mismatch(conflicts: list[Conflict], *, there: str = "on the source") -> ManifestMismatchError:
    """One error for all conflicts, the first few of them in words."""
    lines = [
        f"tensor {c['tensor']!r}: {c['field']} is {c['source']} {there}, {c['target']} on the target"
        for c in conflicts[:5]
    ]
    more = f" (and {len(conflicts) - 5} more)" if len(conflicts) > 5 else ""
    return ManifestMismatchError("; ".join(lines) + more, conflicts=conflicts)


def _check_revisions(target: Manifest, others: Sequence[Manifest]) -> None:
    for other in others:
        for field, ours, theirs in (
            ("model", target.model, other.model),
            ("revision", target.revision, other.revision),
        ):
            # Shells that were built by hand may have no name yet.
            if ours and theirs and ours != theirs:
                raise ManifestMismatchError(
                    f"model {other.model!r} rank {other.rank}: {field} is {theirs!r} on the source, {ours!r} on rank "
                    f"{target.rank} of the target",
                    model=other.model,
                    rank=other.rank,
                    field=field,
                )


def _conflicts(target: Manifest, source: Manifest) -> Iterator[Conflict]:
    tied: dict[Region, TensorEntry] = {}
    tied_names, held_by_name = target.tied, source.by_name
    common = target.whole & source.whole
    is_same_rank = (target.topology, target.rank) == (source.topology, source.rank)
    # One thing under one name is the checkpoint's tensor, whole, or what one rank has.
    for tensor in target.tensors if is_same_rank else map(target.by_name.__getitem__, sorted(common)):
        held = held_by_name.get(tensor.name)
        if held is None or (
            held.dtype == tensor.dtype and held.shape == tensor.shape and tensor.name not in tied_names
        ):
            continue
        if tensor.name not in common and tensor.is_placed and held.is_placed:
            continue
        if held.state != tensor.state or (
            held.dtype != tensor.dtype and _is_converted((target, tensor), (source, held))
        ):
            # Another thing under the name: it is not taken, and in nobody's way.
            continue
        yield from _differences(tensor.name, (tensor.dtype, tensor.shape), (held.dtype, held.shape))
        if tensor.name not in tied_names:
            continue
        first = tied.setdefault(target.flat_region(tensor), held)
        if source.flat_region(first) != source.flat_region(held) and first.digest != held.digest:
            yield {
                "tensor": tensor.name,
                "field": "value",
                "source": f"not that of {first.name!r}",
                "target": f"tied to {first.name!r}",
            }


def _is_converted(one: tuple[Manifest, TensorEntry], other: tuple[Manifest, TensorEntry]) -> bool:
    """Whether one side holds a tensor as the checkpoint of the other side has it, which was converted there."""
    name = one[1].name
    sides = (one[0].specs.get(name), other[1].dtype), (other[0].specs.get(name), one[1].dtype)
    return any(spec is not None and spec.dtype == dtype for spec, dtype in sides)


def _differences(
    name: str, target: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]
) -> Iterator[Conflict]:
    if target[0] != other[0]:
        yield {"tensor": name, "field": "dtype", "source": other[0], "target": target[0]}
    if target[1] != other[1]:
        yield {"tensor": name, "field": "shape", "source": str(list(other[1])), "target": str(list(target[1]))}


def _placed_alike(tensor: TensorEntry, held: TensorEntry) -> bool:
    """Whether two placements are one, wherever in their storages the tensors begin."""
    if len(tensor.placement) != len(held.placement) or len(tensor.constants) != len(held.constants):
        return False
    shift = held.offset - tensor.offset
    pieces = zip(tensor.placement, held.placement, strict=True)
    constants = zip(tensor.constants, held.constants, strict=True)
    return all(
        a.name == b.name
        and a.runtime_offset + shift == b.runtime_offset
        and a.checkpoint_offset == b.checkpoint_offset
        and a.pattern == b.pattern
        for a, b in pieces
    ) and all(a.shifted(shift) == b for a, b in constants)


def _follow_each_other(tensor: TensorEntry) -> bool:
    """Whether, in order, each piece ends before the next begins, all inside a shell without gaps.

    So it is in nearly every shell, and it is seen without looking at single elements.
    """
    if len(tensor.placement) == 1 and not tensor.constants:
        (piece,), region = tensor.placement, tensor.region
        first, end = region.offset, region.end
        is_inside = first <= piece.runtime_offset and piece.runtime_offset + piece.pattern.runtime_reach <= end
        # Without gaps: that no element of a shell lies where another does, its manifest has seen to.
        return is_inside and end - first == region.numel and not piece.pattern.repeats
    spans: list[tuple[int, int]] = []
    for piece in tensor.placement:
        pattern, begin = piece.pattern, piece.runtime_offset
        if pattern.repeats:
            return False
        spans.append((begin, begin + pattern.runtime_reach))
    spans.extend((constant.runtime.offset, constant.runtime.end) for constant in tensor.constants)
    region = tensor.region
    at = region.offset
    for begin, end in sorted(spans):
        if begin < end:
            if begin < at:
                return False
            at = end
    return at <= region.end and region.is_dense
