"""Ranks, stages and experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.transfer.errors import TopologyError
from weightwire.transfer.manifest import Topology
from weightwire.transfer.ranks import ExpertPlacement, GroupRank, RankPlace, stage_layers


def test_place_follows_global_rank_is_pp_rank_times_tp_plus_tp_rank() -> None:
    place = RankPlace.of(Topology(tp=8, pp=2, ep=4), 13)
    assert (place.tensor, place.pipeline) == (GroupRank(5, 8), GroupRank(1, 2))
    assert (place.expert, place.expert_tensor) == (GroupRank(2, 4), GroupRank(1, 2))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_every_place_of_a_topology_is_another(block: int, ep: int, pp: int) -> None:
    topology = Topology(tp=block * ep, pp=pp, ep=ep)
    places = {
        (place.pipeline.rank, place.expert.rank, place.expert_tensor.rank)
        for place in (RankPlace.of(topology, rank) for rank in range(topology.world_size))
    }
    assert len(places) == topology.world_size


@pytest.mark.parametrize("rank", [-1, 4])
def test_place_outside_the_topology_is_refused(rank: int) -> None:
    with pytest.raises(TopologyError, match=f"rank {rank}: not one of the 4"):
        RankPlace.of(Topology(tp=2, pp=2), rank)


def test_group_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(TopologyError, match="rank 2: not in a group of 2"):
        GroupRank(2, 2)


def test_stages_are_contiguous_and_the_first_take_the_remainder() -> None:
    assert [stage_layers(7, GroupRank(rank, 3)) for rank in range(3)] == [range(3), range(3, 5), range(5, 7)]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(TopologyError, match="pp=3: more stages than the model's 2 layers"):
        stage_layers(2, GroupRank(0, 3))


# L62
def test_equal_blocks_own_neighbouring_experts() -> None:
    placement = ExpertPlacement.equal(8, 4)
    assert placement.local_slots(5, 2) == (1,)
    assert placement.local_slots(3, 2) == ()
    assert [expert for expert in range(8) if placement.local_slots(expert, 2)] == [4, 5]


def test_experts_that_do_not_divide_need_a_map() -> None:
    with pytest.raises(TopologyError, match="ep=4: does not divide the model's 6 experts"):
        ExpertPlacement.equal(6, 4)
    uneven = ExpertPlacement.from_map(6, [[0, 1], [2, 3], [4], [5]])
    assert [uneven.num_local(rank) for rank in range(4)] == [2, 2, 1, 1]


# L64
def test_replicas_lie_in_every_slot_of_the_map() -> None:
    placement = ExpertPlacement.from_map(4, [[0, 1, 2], [3, 0, 1]])
    assert placement.local_slots(0, 0) == (0,)
    assert placement.local_slots(0, 1) == (1,)


class Counted(tuple[int, ...]):
    """Slots that say how often somebody went through all of them."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        type(self).passes += 1
        return super().__iter__()


# L61, L64
def test_slots_of_an_expert_are_found_without_going_through_all() -> None:
    slots = Counted(slot % 1000 for slot in range(5000))
    placement = ExpertPlacement(num_experts=1000, ranks=(slots, slots))
    built = Counted.passes
    found = [placement.local_slots(expert, rank) for rank in range(2) for expert in range(1000)]
    assert found == 2 * [tuple(range(expert, 5000, 1000)) for expert in range(1000)]
    assert (built, Counted.passes) == (2, 2)


def test_map_with_more_slots_on_a_rank_than_anybody_means_is_refused() -> None:
    with pytest.raises(TopologyError, match="expert map: has 65537 slots on one rank, expected at most 65536"):
        ExpertPlacement.from_map(1, [[0], [0] * 65537])
    assert ExpertPlacement.from_map(1, [[0], [0] * 65536]).num_local(1) == 65536


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        pytest.param([[0, 1]], r"\[2\] have no slot", id="an expert without a slot"),
        pytest.param([[0, 1], [2, 3]], r"\[3\] are not among them", id="a slot of no expert"),
        pytest.param([], "have no slot", id="no rank at all"),
    ],
)
def test_map_that_is_no_map_is_refused(ranks: list[list[int]], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ExpertPlacement.from_map(3, ranks)
