"""One rank of a real vLLM model, built without its peers: its shells, and the loader that fills them.

A rank of a tensor-parallel vLLM belongs to process groups before it can say what its share of a weight is. Here the
groups are torch's fake ones, whose collectives do nothing, so that a single process can be any rank of any world.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed
import vllm.config
import vllm.distributed.parallel_state as parallel_state
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import models
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightwire.transfer.manifest import Topology
from weightwire.transfer.tracing import LoadWeights

# Allocations of fewer elements stay real among meta shells: tables that a layer computes with while it is built.
LARGE_ELEMENTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Builds the model of one rank, as often as asked.

    Attributes:
        computes_while_built: Whether layers compute with tensors while they are built. The table of the experts that
            a rank holds is such a tensor.
    """

    config: vllm.config.VllmConfig
    tp_rank: int
    computes_while_built: bool

    def build(self, device: str) -> Model:
        """The module tree, its weights allocated on `device` and not filled.

        Nothing can be computed on the meta device, so that only what is large goes there where that is needed.
        """
        _forget_models(self.config)
        with ExitStack() as stack:
            stack.enter_context(set_default_torch_dtype(self.config.model_config.dtype))
            if device == "meta" and self.computes_while_built:
                stack.enter_context(torch.device("cpu"))
                stack.enter_context(_LargeOnMeta())
            else:
                stack.enter_context(torch.device(device))
            return Model(initialize_model(vllm_config=self.config, model_config=self.config.model_config))


class Model(Mapping[str, torch.Tensor]):
    """The shells of a model by runtime name: its parameters and lasting buffers.

    Each is looked up anew, so that one that the loader replaces is noticed.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._names = dict.fromkeys(module.state_dict())

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> object:
        return cast("LoadWeights", self.module.load_weights)(tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        owner, _, leaf = name.rpartition(".")
        found = getattr(self.module.get_submodule(owner), leaf)
        assert isinstance(found, torch.Tensor)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def one_rank(
    folder: Path, topology: Topology, rank: int, *, expert_parallel: bool = False, computes_while_built: bool = False
) -> Iterator[Rank]:
    """A rank of the model that `folder` holds the config.json of.

    Args:
        expert_parallel: Whether experts lie whole on one rank each, rather than a slice of each on all ranks.
    """
    _register_in_process(folder)
    arguments = EngineArgs(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        enable_expert_parallel=expert_parallel,
    )
    config = arguments.create_engine_config()
    # Said only now: EngineArgs would want to see as many processors.
    parallel, num_ranks = config.parallel_config, topology.world_size
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = topology.tp, topology.pp
    parallel.world_size, parallel.rank = num_ranks, rank
    with pytest.MonkeyPatch.context() as patch, vllm.config.set_current_vllm_config(config), torch.no_grad():
        _without_peers(patch, num_ranks)
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        try:
            parallel_state.init_distributed_environment(num_ranks, rank, local_rank=0, backend="fake")
            parallel_state.initialize_model_parallel(topology.tp, topology.pp, backend="fake")
            yield Rank(
                config=config,
                tp_rank=parallel_state.get_tensor_model_parallel_rank(),
                computes_while_built=computes_while_built or expert_parallel,
            )
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _register_in_process(folder: Path) -> None:
    """Have vLLM look at the model class here; by default it starts an interpreter, and that takes seconds, for each."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    models.ModelRegistry.register_model(architecture, models.ModelRegistry.models[architecture].load_model_cls())


def _forget_models(config: vllm.config.VllmConfig) -> None:
    """vLLM expects one model in a process, and remembers things by name, and by an address that may come again."""
    config.compilation_config.static_forward_context.clear()
    rotary_embedding._ROPE_DICT.clear()
    models.utils._model_to_pp_missing_layer_names.clear()


def _without_peers(patch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Leave out what asks the peers something: a fake group answers with uninitialised bytes."""
    new_group = torch.distributed.new_group

    def fake_group(ranks: list[int] | None = None, **_: object) -> object:
        return new_group(ranks, backend="fake")

    patch.setattr(torch.distributed, "new_group", fake_group)
    patch.setattr(parallel_state, "in_the_same_node_as", lambda group, source_rank=0: [True] * num_ranks)
    patch.setattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda communicator: False)
    patch.setattr(MessageQueue, "create_from_process_group", staticmethod(lambda *_: None))


class _LargeOnMeta(TorchFunctionMode):
    """Allocates what is large on the meta device."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones) and _elements(args, kwargs) >= LARGE_ELEMENTS:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _elements(args: tuple[object, ...], kwargs: dict[str, object]) -> int:
    sizes = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
    assert isinstance(sizes, tuple | list), f"the size is {sizes!r}, expected a sequence"
    return math.prod(int(size) for size in sizes)
