"""Checkpoints on disk: which files they are, what the files say, and reads and writes of exactly these bytes."""

from weightwire.transfer.checkpoint.discovery import CheckpointFiles, find_checkpoint
from weightwire.transfer.checkpoint.reader import Checkpoint, CheckpointTensor, checkpoint_revision, read_header
from weightwire.transfer.checkpoint.safetensors_format import (
    Header,
    HeaderEntry,
    build_header,
    parse_header,
    parse_prefix,
)
from weightwire.transfer.checkpoint.writer import WritableTensor, iter_pieces, plan_file, write_safetensors

__all__ = [
    "Checkpoint",
    "CheckpointFiles",
    "CheckpointTensor",
    "Header",
    "HeaderEntry",
    "WritableTensor",
    "build_header",
    "checkpoint_revision",
    "find_checkpoint",
    "iter_pieces",
    "parse_header",
    "parse_prefix",
    "plan_file",
    "read_header",
    "write_safetensors",
]
