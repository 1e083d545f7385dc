"""vLLM's own weight loaders, unmodified: what a trace of one says, done again, is what the loader does.

Each case is one rank with a random checkpoint. The placement is traced on shells without memory; the replay fills
shells in memory, the loader gets the tensors of what is opaque, and all has to be as after an ordinary load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.vllm.architectures import ARCHITECTURES, DEFAULTS, GPT_OSS, Architecture
from tests.vllm.engine import Model, Rank, one_rank
from weightwire.transfer.dtypes import dtype_of
from weightwire.transfer.manifest import CheckpointSpec, Topology
from weightwire.transfer.replay import check_trace
from weightwire.transfer.tracing import LoadWeights, Trace, trace_placement

# No loader leaves such bytes by chance.
POISON = 0x7F
TP2, STAGES = Topology(tp=2), Topology(tp=2, pp=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model as it is published, whole.

    Attributes:
        folder: With the config.json.
        tensors: The checkpoint by name, in its order.
    """

    architecture: Architecture
    folder: Path
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model as one rank sees it."""

    published: Published
    rank: Rank

    def build(self) -> tuple[LoadWeights, Model]:
        """Shells in memory, their parameters poisoned; buffers keep what they are made with."""
        model = self.rank.build("cpu")
        for parameter in model.module.parameters():
            parameter.detach().view(-1).view(torch.uint8).fill_(POISON)
        return model.load_weights, model

    def trace(self) -> Trace:
        """Of shells that have no memory."""
        model = self.rank.build("meta")
        checkpoint = (
            CheckpointSpec(name=name, dtype=dtype_of(tensor).name, shape=tuple(tensor.shape))
            for name, tensor in self.published.tensors.items()
        )
        return trace_placement(model.load_weights, model, checkpoint)


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda architecture: architecture.title)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    architecture: Architecture = request.param
    folder = tmp_path_factory.mktemp("model")
    architecture.write_config(folder)
    return Published(architecture=architecture, folder=folder, tensors=architecture.make_tensors(folder))


@pytest.fixture(
    params=[
        *(pytest.param((TP2, rank), id=f"tp 2, rank {rank}") for rank in range(TP2.world_size)),
        *(pytest.param((STAGES, rank), id=f"tp 2, pp 2, rank {rank}") for rank in range(STAGES.world_size)),
    ]
)
def case(request: pytest.FixtureRequest, published: Published) -> Iterator[Case]:
    topology, rank = request.param
    with one_rank(
        published.folder,
        topology,
        rank,
        expert_parallel=published.architecture.expert_parallel,
        computes_while_built=published.architecture.computes_while_built,
    ) as built:
        yield Case(published=published, rank=built)


def test_vllm_loader_is_replayed_bit_for_bit(case: Case) -> None:
    found = check_trace(case.build, case.published.tensors)
    found.check_equal()
    _, shells = case.build()
    assert found.opaque.keys() == shells.keys() & case.published.architecture.opaque_on(case.rank.tp_rank)
    assert found.uncovered.keys() == {name for name in shells if name.rpartition(".")[2] in DEFAULTS}
    assert found.overwritten == {}
    assert case.trace() == found.trace


@pytest.mark.parametrize("published", [GPT_OSS], indirect=True, ids=lambda architecture: architecture.title)
@pytest.mark.parametrize("case", [(TP2, 1)], indirect=True, ids=["tp 2, rank 1"])
def test_checkpoint_tensor_that_a_rank_writes_to_is_no_source(case: Case) -> None:
    trace = case.trace()
    name = "model.layers.0.mlp.experts.down_proj_bias"
    assert name in case.published.tensors
    assert trace.feeds["model.layers.0.mlp.experts.routed_experts.w2_bias"] == {name}
    assert name in trace.ordinary
    assert not [copy for copy in trace.copies if copy.name == name]
