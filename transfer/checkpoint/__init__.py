"""Checkpoints on disk: which files they are, what the files say, and reads and writes of exactly these bytes."""

from weightwire.transfer.checkpoint.discovery import (
    CheckpointFiles,
    DiscoveryOptions,
    DuplicatePolicy,
    find_checkpoint,
)
from weightwire.transfer.checkpoint.formats import LoadConfig, LoadFormat, Quantization, ReaderOptions
from weightwire.transfer.checkpoint.reader import Checkpoint, CheckpointTensor, checkpoint_revision, read_header
from weightwire.transfer.checkpoint.safetensors_format import (
    Header,
    HeaderEntry,
    build_header,
    parse_header,
    parse_prefix,
)
from weightwire.transfer.checkpoint.sources import WeightSource, chain_sources, select_draft
from weightwire.transfer.checkpoint.writer import WritableTensor, iter_pieces, plan_file, write_safetensors

__all__ = [
    "Checkpoint",
    "CheckpointFiles",
    "CheckpointTensor",
    "DiscoveryOptions",
    "DuplicatePolicy",
    "Header",
    "HeaderEntry",
    "LoadConfig",
    "LoadFormat",
    "Quantization",
    "ReaderOptions",
    "WeightSource",
    "WritableTensor",
    "build_header",
    "chain_sources",
    "checkpoint_revision",
    "find_checkpoint",
    "iter_pieces",
    "parse_header",
    "parse_prefix",
    "plan_file",
    "read_header",
    "select_draft",
    "write_safetensors",
]
