"""A model of transformers that our walker filled computes, bit for bit, what its own `from_pretrained` computes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from tests.real.conftest import digests
from weightwire.transfer.checkpoint import find_checkpoint
from weightwire.transfer.checkpoint.iteration import open_reader
from weightwire.transfer.loading.loop import load_weights
from weightwire.transfer.models import build_defaults

# "The capital of France is", and " Paris", by the model's tokenizer.
QUESTION, ANSWER = [504, 3575, 282, 4649, 314], 7042
# The words "hello world", between the marks of begin and end.
GREETING = [101, 7592, 2088, 102]


# L74, L79
@torch.inference_mode()
def test_smollm2_filled_by_the_walker_has_bit_equal_logits(smollm2: Path) -> None:
    theirs = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    with build_defaults("cpu", torch.bfloat16):
        ours = LlamaForCausalLM(LlamaConfig.from_pretrained(smollm2)).train(False)
    load_weights(ours, open_reader(find_checkpoint(smollm2)).iterate(), central=True)
    assert digests(ours.state_dict().items()) == digests(theirs.state_dict().items())
    tokens = torch.tensor([QUESTION])
    logits = ours(tokens).logits
    assert torch.equal(logits, theirs(tokens).logits)
    assert int(logits[0, -1].argmax()) == ANSWER


# L74, L79
@torch.inference_mode()
def test_minilm_filled_by_the_walker_has_bit_equal_states(minilm: Path) -> None:
    theirs = BertModel.from_pretrained(minilm)
    ours = BertModel(BertConfig.from_pretrained(minilm)).train(False)
    load_weights(ours, open_reader(find_checkpoint(minilm)).iterate(), central=True)
    assert digests(ours.state_dict().items()) == digests(theirs.state_dict().items())
    tokens = torch.tensor([GREETING])
    assert torch.equal(ours(tokens).last_hidden_state, theirs(tokens).last_hidden_state)
