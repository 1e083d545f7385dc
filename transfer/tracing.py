"""Learns where a weight loader puts every checkpoint element, by running it once on meta tensors.

The loader is given checkpoint tensors without storage. A dispatch mode sees each operator: a copy from a checkpoint
tensor into a shell is recorded and not executed, a fill likewise; views need no handling, since torch keeps offset,
shape and strides through any chain of them. No shell byte changes.

What cannot be known is *opaque* and never guessed: a source that was computed, a checkpoint tensor that the loader
wrote to, either side seen as another dtype, a shell that was read back, rebound or written by another operator. An
opaque shell goes through the ordinary loader, with all checkpoint tensors that feed it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightwire.transfer.coverage import Coverage, count_coverage
from weightwire.transfer.dtypes import dtype_named
from weightwire.transfer.errors import PlacementError
from weightwire.transfer.manifest import CheckpointSpec
from weightwire.transfer.regions import Region

LoadWeights = Callable[[Iterator[tuple[str, torch.Tensor]]], object]

_aten = torch.ops.aten
_READS_VALUES = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCopy:
    """`shell[target] <- checkpoint[source]`, element for element.

    Attributes:
        shell: Runtime name, the first of those that share the storage.
        target: Elements of the storage that the shell lies in.
        name: Checkpoint name.
        source: Elements of the row-major checkpoint tensor.
        is_cast: Whether the copy converts the dtype.
    """

    shell: str
    target: Region
    name: str
    source: Region
    is_cast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedFill:
    """`shell[target] = value`, such as the zeros of padding."""

    shell: str
    target: Region
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one run of a loader does.

    Attributes:
        events: Copies and fills in the order in which the loader made them.
        opaque: By runtime name, why it is not known what lies there.
        feeds: By opaque runtime name, the checkpoint tensors that are known to reach it.
        coverage: By runtime name (first of an alias group), how often its elements are written.
        used: Checkpoint names that the loader took from its iterator.
    """

    events: tuple[TracedCopy | TracedFill, ...]
    opaque: Mapping[str, str]
    feeds: Mapping[str, frozenset[str]]
    coverage: Mapping[str, Coverage]
    used: frozenset[str]

    @property
    def copies(self) -> tuple[TracedCopy, ...]:
        return tuple(event for event in self.events if isinstance(event, TracedCopy))

    @property
    def uncovered(self) -> Mapping[str, int]:
        """Elements that nothing wrote, by runtime name; opaque shells aside."""
        return {
            name: found.missing for name, found in self.coverage.items() if found.missing and name not in self.opaque
        }

    @property
    def overwritten(self) -> Mapping[str, int]:
        """Elements that were written more than once, by runtime name; the later write counts."""
        return {name: found.repeated for name, found in self.coverage.items() if found.repeated}


def trace_placement(
    load_weights: LoadWeights, shells: Mapping[str, torch.Tensor], checkpoint: Iterable[CheckpointSpec]
) -> Trace:
    """Run a loader without data, and record what it does.

    Args:
        load_weights: Takes `(name, tensor)` pairs; must not start threads.
        shells: Parameters and buffers by runtime name, on any device, meta included. Several names may share memory.
        checkpoint: Names, dtypes and shapes; these tensors are handed over on the meta device.

    Raises:
        PlacementError: If the loader asks for a value, which does not exist here.
        LoadError: What the loader itself raises.
    """
    recorder = _Recorder(shells)
    with recorder:
        load_weights(recorder.feed(checkpoint))
    return recorder.finish()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates no base class hook
    """Sees every operator of the loader.

    Storages are recognised by the address of their descriptor, so all of them are kept alive until the end.
    """

    def __init__(self, shells: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shells = shells
        self._owners: dict[int, str] = {}
        for name, shell in shells.items():
            self._owners.setdefault(_key(shell), name)
        self._keys = {name: _key(shell) for name, shell in shells.items()}
        self._alive: list[torch.Tensor] = list(shells.values())
        self._sources: dict[int, str] = {}
        # Of checkpoint tensors and first shells alike: what their elements are.
        self._dtypes = {key: shells[name].dtype for key, name in self._owners.items()}
        self._taints: dict[int, frozenset[str]] = {}
        self._events: list[TracedCopy | TracedFill] = []
        self._opaque: dict[str, str] = {}
        self._feeds: defaultdict[str, set[str]] = defaultdict(set)
        self._used: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled, and torch would import its compiler, which takes a second, to say so."""
        return False

    def feed(self, checkpoint: Iterable[CheckpointSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in checkpoint:
            tensor = torch.empty(spec.shape, dtype=dtype_named(spec.dtype).torch_dtype, device="meta")
            key = _key(tensor)
            self._sources[key], self._dtypes[key] = spec.name, tensor.dtype
            self._alive.append(tensor)
            self._used.add(spec.name)
            yield spec.name, tensor

    def finish(self) -> Trace:
        for name, shell in self._shells.items():
            if _key(shell) != self._keys[name]:
                self._refuse(name, "rebound: the parameter has other memory now", ())
        for event in self._events:
            if isinstance(event, TracedCopy) and event.shell in self._opaque:
                self._feeds[event.shell].add(event.name)
        return Trace(
            events=tuple(event for event in self._events if event.shell not in self._opaque),
            opaque=dict(self._opaque),
            feeds={name: frozenset(names) for name, names in self._feeds.items()},
            coverage=self._coverage(),
            used=frozenset(self._used),
        )

    def _coverage(self) -> dict[str, Coverage]:
        written: defaultdict[str, list[Region]] = defaultdict(list)
        for event in self._events:
            written[event.shell].append(event.target)
        owners = set(self._owners.values())
        return {
            name: count_coverage(_region(shell), written[name])
            for name, shell in self._shells.items()
            if name in owners
        }

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func.is_view:
            return self._view(func, args, kwargs)
        if func is _aten.copy_.default:
            target, source = args[:2]
            if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor) and _key(target) in self._owners:
                self._record_copy(target, source)
                return target
        elif func in _FILLS and isinstance(args[0], torch.Tensor) and _key(args[0]) in self._owners:
            self._record_fill(args[0], 0 if len(args) == 1 else args[1])
            return args[0]
        elif func is _aten._to_copy.default and _keeps_dtype(args[0], kwargs):
            # Only the device changes: the same elements.
            return args[0]
        return self._run(func, args, kwargs)

    def _record_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        shell, key = self._owners[_key(target)], _key(source)
        if key in self._taints or key not in self._sources:
            self._refuse(shell, "computed: the copied tensor is not a view of a checkpoint tensor", self._names(source))
            return
        if not self._is_as_stored(source) or not self._is_as_stored(target):
            self._refuse(shell, "reinterpreted: the copy sees one side as another dtype", self._names(source))
            return
        self._events.append(
            TracedCopy(
                shell=shell,
                target=_region(target),
                name=self._sources[key],
                source=_region(source if source.shape == target.shape else source.expand(target.shape)),
                is_cast=source.dtype != target.dtype,
            )
        )

    def _record_fill(self, target: torch.Tensor, value: object) -> None:
        shell = self._owners[_key(target)]
        if isinstance(value, torch.Tensor):
            self._refuse(shell, "computed: filled with the value of a tensor", self._names(value))
        elif not isinstance(value, (bool, int, float)) or (isinstance(value, int) and int(float(value)) != value):
            self._refuse(shell, f"filled with {value}, which is no float", ())
        elif not self._is_as_stored(target) and (value or target.itemsize != self._dtypes[_key(target)].itemsize):
            self._refuse(shell, "reinterpreted: the fill sees the shell as another dtype", ())
        else:
            self._events.append(TracedFill(shell=shell, target=_region(target), value=float(value)))

    def _is_as_stored(self, view: torch.Tensor) -> bool:
        """Whether a view's elements are those of its storage, not bits of them, their negatives or conjugates."""
        return view.dtype == self._dtypes[_key(view)] and not view.is_neg() and not view.is_conj()

    def _view(self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Tensors are known by their storages, so that a view needs nothing; some operators may copy instead."""
        result, of = func(*args, **kwargs), args[0]
        is_view = isinstance(result, torch.Tensor) and isinstance(of, torch.Tensor) and _key(result) == _key(of)
        return result if is_view else self._computed(result, (args, kwargs))

    def _run(self, func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Any other operator: executed, unless it would write to a shell; what it computes is tainted."""
        inputs = list(_tensors((args, kwargs)))
        if not inputs:
            return func(*args, **kwargs)
        reached = self._reached(inputs)
        if func in _READS_VALUES and (reached or any(_key(tensor) in self._owners for tensor in inputs)):
            raise PlacementError(
                f"checkpoint tensors {sorted(reached)}: the loader asks for a value ({func}), expected only views and "
                "copies; it cannot be traced",
                tensor=next(iter(sorted(reached)), None),
            )
        written = _written(func, args, kwargs) if func._schema.is_mutable else []
        for tensor in written:
            if _key(tensor) in self._owners:
                self._refuse(self._owners[_key(tensor)], f"written by {func}", reached)
            else:
                self._taint(tensor, reached)
        # Shells stay as they are; into real memory of the loader's own there is nothing real to write.
        if any(_key(tensor) in self._owners or (reached and not tensor.is_meta) for tensor in written):
            return written[0] if func._schema.returns else None
        return self._computed(func(*args, **kwargs), inputs)

    def _computed(self, result: object, inputs: object) -> object:
        """Taint what an operator made."""
        results = list(_tensors(result))
        if not results:
            return result
        found = list(_tensors(inputs))
        reached = self._reached(found)
        if reached or any(_key(tensor) in self._owners for tensor in found):
            for tensor in results:
                if _key(tensor) not in self._sources and _key(tensor) not in self._owners:
                    self._taint(tensor, reached)
        return result

    def _reached(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        return frozenset[str]().union(*(self._names(tensor) for tensor in tensors))

    def _taint(self, tensor: torch.Tensor, reached: frozenset[str]) -> None:
        if reached or _key(tensor) in self._sources:
            self._alive.append(tensor)
            self._taints[_key(tensor)] = self._taints.get(_key(tensor), frozenset()) | reached

    def _names(self, tensor: torch.Tensor) -> frozenset[str]:
        """The checkpoint tensors that a tensor was made from."""
        key = _key(tensor)
        own = {self._sources[key]} if key in self._sources else set[str]()
        return frozenset(own | self._taints.get(key, frozenset()))

    def _refuse(self, shell: str, reason: str, reached: Iterable[str]) -> None:
        self._opaque.setdefault(shell, reason)
        self._feeds[shell].update(reached)


_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _region(tensor: torch.Tensor) -> Region:
    return Region(offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), strides=tensor.stride())


def _keeps_dtype(tensor: object, kwargs: Mapping[str, object]) -> bool:
    return isinstance(tensor, torch.Tensor) and kwargs.get("dtype") in (None, tensor.dtype)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _written(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    """The arguments that the operator writes to, by its schema."""
    return [
        tensor
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    ]
