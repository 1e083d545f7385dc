"""When a target takes over a manifest: only if its own would be the same to the last digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.transfer.conftest import filled
from weightwire.transfer.adoption import adoptable
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import Manifest, Topology
from weightwire.transfer.shells import Shells

TENSORS = {"a": filled("float32", (3, 4)), "b": filled("int16", (5,)), "none": torch.empty(0)}
IDENTITY = ModelIdentity(model="m", revision="r", config="{}")


def sealed(tensors: dict[str, torch.Tensor] | None = None, *, chunk_bytes: int = 16) -> Manifest:
    return Shells.from_tensors(tensors or TENSORS, IDENTITY, chunk_bytes=chunk_bytes).seal()


def layout() -> Manifest:
    return Shells.allocate(sealed()).manifest


def test_manifest_of_the_same_layout_is_adopted() -> None:
    held = sealed()
    assert adoptable(layout(), [held]) is held
    other = sealed({"a": TENSORS["a"] + 1, "b": TENSORS["b"], "none": TENSORS["none"]})
    assert adoptable(layout(), [other, held]) is other


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda held: replace(held, model="other"), id="another model"),
        pytest.param(lambda held: replace(held, revision="other"), id="another revision"),
        pytest.param(lambda held: replace(held, config=None), id="no config"),
        pytest.param(lambda held: replace(held, topology=Topology(tp=2)), id="another topology"),
        pytest.param(lambda held: replace(held, topology=Topology(tp=2), rank=1), id="another rank"),
        pytest.param(lambda _: sealed(chunk_bytes=8), id="other chunks"),
        pytest.param(lambda _: sealed({"b": TENSORS["b"], "a": TENSORS["a"]}), id="another order"),
        pytest.param(lambda _: sealed({"a": TENSORS["a"], "b": TENSORS["b"]}), id="a tensor less"),
        pytest.param(lambda _: sealed({**TENSORS, "c": filled("int8", (1,))}), id="a tensor more"),
        pytest.param(
            lambda _: sealed({**TENSORS, "a": filled("float32", (4, 3)).T.contiguous().T[:3]}), id="other strides"
        ),
        pytest.param(lambda held: replace(held, chunk_digests=b""), id="no digests of chunks"),
        pytest.param(
            lambda held: replace(held, tensors=(replace(held.tensors[0], digest=""), *held.tensors[1:])),
            id="no digest of a tensor",
        ),
    ],
)
def test_manifest_that_differs_is_not_adopted(change: Callable[[Manifest], Manifest]) -> None:
    changed = change(sealed())
    assert changed != sealed()
    assert adoptable(layout(), [changed]) is None


def test_manifest_with_bytes_of_no_tensor_is_not_adopted() -> None:
    whole = filled("uint8", (40,))
    shells = Shells.from_tensors({"a": whole[:10], "b": whole[20:]}, IDENTITY, chunk_bytes=16)
    held = shells.seal()
    assert held.total_bytes > 30
    assert adoptable(Shells.allocate(held).manifest, [held]) is None
