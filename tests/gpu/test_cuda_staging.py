"""What tests/transfer/test_staging.py says of shells that are reached through buffers, of shells on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.transfer.conftest import Serve, filled, serve  # noqa: F401  (a fixture)
from tests.transfer.test_staging import (  # noqa: F401  (collected here a second time)
    Place,
    contents,
    run,
    test_digests_are_those_of_plain_shells,
    test_disk_gives_what_no_source_has_whole_strided_and_cast,
    test_gather_and_scatter_take_every_view_bit_for_bit,
    test_many_small_tensors_arrive_in_another_order,
    test_memory_is_not_handed_out,
    test_module_is_filled_in_place,
    test_pull_moves_every_view_from_and_to_staged_shells,
    test_saved_file_and_what_the_source_exports_are_those_of_plain_shells,
    test_steps_are_a_chunk_each_and_whole_together,
)
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.shells import Shells

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.fixture
def place() -> Place:
    return Place(device="cuda:0")


def test_model_that_lies_on_the_cpu_in_part_is_filled_where_it_lies(serve: Serve, place: Place) -> None:  # noqa: F811
    values = {"a": filled("float32", (40,)), "b": filled("bfloat16", (9, 9)), "c": filled("uint8", (50,))}
    tensors = {"a": torch.empty(40), "b": torch.empty(9, 9, dtype=torch.bfloat16, device=place.device)}
    shells = Shells.from_tensors(
        tensors | {"c": torch.empty(50, dtype=torch.uint8)}, ModelIdentity(model="m"), chunk_bytes=64
    )
    run(shells, serve(values))
    assert contents(shells) == contents(values)
    run(Place().want(values), serve(shells, instance_id="back"))


def test_what_a_stream_of_the_caller_still_has_to_write_is_served(serve: Serve, place: Place) -> None:  # noqa: F811
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    tensor = torch.zeros(1 << 20, device=place.device)
    busy = torch.ones(4096, 4096, device=place.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Some time before the write that counts.
        for _ in range(20):
            busy = busy @ busy
        tensor.fill_(3.0)
        served = serve({"t": tensor}, chunk_bytes=1 << 20)
    target = Place().want({"t": torch.empty(1 << 20)}, chunk_bytes=1 << 20)
    run(target, served)
    assert bool((target.tensor("t") == 3.0).all())
