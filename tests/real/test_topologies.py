"""A published model, cut for three ranks and put together again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.real.test_transformers import ANSWER, QUESTION
from tests.topologies.instances import PATIENCE_S, POISON, differing, load_rank, pull_rank, serve_ranks
from weightwire.transfer.checkpoint import Checkpoint
from weightwire.transfer.control import Control
from weightwire.transfer.filling import fill
from weightwire.transfer.local_disk import identity_of, load_checkpoint
from weightwire.transfer.manifest import Topology
from weightwire.transfer.models import build_defaults
from weightwire.transfer.shells import Shells

THREE = Topology(tp=3)


def test_smollm2_from_three_ranks_has_the_logits_of_a_load_from_disk(smollm2: Path) -> None:
    theirs = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    with build_defaults("cpu", torch.bfloat16):
        ours = LlamaForCausalLM(LlamaConfig.from_pretrained(smollm2)).train(False)
    shells = Shells.from_module(ours)
    shells.fill(POISON)
    with contextlib.ExitStack() as stack:
        instance = serve_ranks({rank: load_rank(smollm2, THREE, rank) for rank in range(3)}, stack)
        result = fill(shells, instance.origins(0), control=Control(deadline_s=PATIENCE_S))
    given = [source.nbytes for source in result.sources]
    assert (len(given), result.bytes_disk) == (3, 0)
    assert max(given) <= 1.1 * sum(given) / 3
    tokens = torch.tensor([QUESTION])
    with torch.inference_mode():
        logits = ours(tokens).logits
        assert torch.equal(logits, theirs(tokens).logits)
    assert int(logits[0, -1].argmax()) == ANSWER


def test_smollm2_from_one_whole_source_fills_three_ranks(smollm2: Path) -> None:
    control = Control(deadline_s=PATIENCE_S)
    with contextlib.ExitStack() as stack, Checkpoint.open(smollm2) as checkpoint:
        held, _ = load_checkpoint(checkpoint, identity_of(checkpoint, model="m"), control=control)
        instance = serve_ranks({0: held}, stack)
        for rank in range(3):
            shells, result = pull_rank(instance, THREE, rank)
            assert result.bytes_disk == 0
            assert differing(shells, load_rank(smollm2, THREE, rank)) == []
