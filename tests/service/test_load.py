"""What `weightwire load` holds in memory, and when it stops."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.faults.checkpoints import DECODER
from weightwire.service.cli.load import _load_ranks, _Sink
from weightwire.transfer.checkpoint import LoadFormat
from weightwire.transfer.control import Control
from weightwire.transfer.errors import CancelledError
from weightwire.transfer.local_tree import RankLoad, TreeRequest
from weightwire.transfer.manifest import Topology
from weightwire.transfer.shells import Shells


@dataclass
class Watching:
    """In place of a sink: remembers the trees that it was given, and holds none."""

    trees: list[weakref.ref[torch.nn.Module]] = field(default_factory=list)
    shows_progress: bool = False

    def save(self, shells: Callable[[], Shells]) -> None:
        loaded = cast("partial[Shells]", shells).args[0]
        assert isinstance(loaded, RankLoad)
        self.trees.append(weakref.ref(loaded.tree))


def test_one_rank_is_in_memory_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(DECODER)))
    request = TreeRequest(folder=tmp_path, topology=Topology(tp=2), load_format=LoadFormat.DUMMY)
    sink = Watching()
    for _ in _load_ranks(request, range(2), Control(deadline_s=60), cast(_Sink, sink)):
        assert sink.trees[-1]() is None
    assert len(sink.trees) == 2


def test_stop_is_seen_while_a_rank_is_saved(tmp_path: Path) -> None:
    control = Control(deadline_s=60)
    control.cancel()
    shells = Shells.from_tensors({"a": torch.zeros(3)})
    with pytest.raises(CancelledError):
        _Sink(folder=tmp_path, control=control, shows_progress=False).save(lambda: shells)
    assert list(tmp_path.iterdir()) == []
