"""The view, letter by letter: at 80 and at 120 columns, live and printed once."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.service.cli.fleets import Json, instance, transfer
from weightwire.service.cli.fleet import Fleet, Rates, transfer_view
from weightwire.service.cli.fleet_view import Page, fleet_lines, transfer_details

INSTANCES = [
    instance("source-d073e90bb349"),
    instance("target-8fb0a198ced4", reason="rank 0 has published nothing", topology={"tp": 8, "pp": 2, "ep": 8}),
    instance("target-8fb0a198ced5", reason="rank 0 has published nothing", versions=(None,)),
]
TRANSFERS = [
    transfer(0, "target-8fb0a198ced4", {"source-d073e90bb349": 300_000_000}),
    transfer(
        1, "target-8fb0a198ced5", {"target-8fb0a198ced4": 200_000_000, "source-d073e90bb349": 0},
        standby={"source-d073e90bb349": 1}, done=200_000_000,
    ),
    transfer(2, "target-3", {}, state="failed", error="2 tensors are held by no source that can be reached: 'a', 'b'"),
]  # fmt: skip
NARROW = """\
instance      state       readers  lease  version  topology        model
source…bb349  ready             1   12 s        1  tp=1            org/ll…struct
target…8ced4  incomplete        1   12 s        1  tp=8,pp=2,ep=8  org/ll…struct
  rank 0 has published nothing
target…8ced5  incomplete            12 s           tp=1            org/ll…struct
  rank 0 has published nothing

transfer            target              state      done      of       rate   ETA
000000000…00000000  target-8f…a198ced4  receiving  30 %  1.0 GB  30.0 MB/s  23 s
000000000…00000001  target-8f…a198ced5  receiving  20 %  1.0 GB  20.0 MB/s  40 s
000000000…00000002  target-3            failed     30 %  1.0 GB  30.0 MB/s
  coverage_incomplete: 2 tensors are held by no source that can be reached: 'a'…

who feeds whom
source-d073e90bb349
└─ target-8fb0a198ced4  receiving  30 %  30.0 MB/s
   └─ target-8fb0a198ced5  receiving  20 %  20.0 MB/s  relay
"""
WIDE = """\
instance             state       readers  lease  version  topology        model
source-d073e90bb349  ready             1   12 s        1  tp=1            org/llama-3-70b-instruct
target-8fb0a198ced4  incomplete        1   12 s        1  tp=8,pp=2,ep=8  org/llama-3-70b-instruct
  rank 0 has published nothing
target-8fb0a198ced5  incomplete            12 s           tp=1            org/llama-3-70b-instruct
  rank 0 has published nothing

transfer                  target               state      done      of       rate   ETA
000000000000000000000000  target-8fb0a198ced4  receiving  30 %  1.0 GB  30.0 MB/s  23 s
000000000000000000000001  target-8fb0a198ced5  receiving  20 %  1.0 GB  20.0 MB/s  40 s
000000000000000000000002  target-3             failed     30 %  1.0 GB  30.0 MB/s
  coverage_incomplete: 2 tensors are held by no source that can be reached: 'a', 'b'

who feeds whom
source-d073e90bb349
└─ target-8fb0a198ced4  receiving  30 %  30.0 MB/s
   └─ target-8fb0a198ced5  receiving  20 %  20.0 MB/s  relay
"""
PRINTED = """\
instance             state       readers  lease  version  topology
source-d073e90bb349  ready             1   12 s        1  tp=1
  org/llama-3-70b-instruct@a1fa97210415
target-8fb0a198ced4  incomplete        1   12 s        1  tp=8,pp=2,ep=8
  org/llama-3-70b-instruct@a1fa97210415
  rank 0 has published nothing
target-8fb0a198ced5  incomplete            12 s           tp=1
  org/llama-3-70b-instruct@a1fa97210415
  rank 0 has published nothing

transfer                  state      done      of       rate   ETA
000000000000000000000000  receiving  30 %  1.0 GB  30.0 MB/s  23 s
  org/llama-3-70b-instruct version 1 to target-8fb0a198ced4, 10.0 s
000000000000000000000001  receiving  20 %  1.0 GB  20.0 MB/s  40 s
  org/llama-3-70b-instruct version 1 to target-8fb0a198ced5, 10.0 s
000000000000000000000002  failed     30 %  1.0 GB  30.0 MB/s
  org/llama-3-70b-instruct version 1 to target-3, 10.0 s
  coverage_incomplete: 2 tensors are held by no source that can be reached: 'a',
  'b'

who feeds whom
source-d073e90bb349
└─ target-8fb0a198ced4  receiving  30 %  30.0 MB/s
   └─ target-8fb0a198ced5  receiving  20 %  20.0 MB/s  relay
"""


def drawn(instances: list[Json], transfers: list[Json], page: Page, rates: Rates | None = None) -> str:
    """As a terminal of that width shows it: a line that were too long would be two."""
    screen = io.StringIO()
    console = Console(file=screen, width=page.width)
    for line in fleet_lines(Fleet.of(instances, transfers, at=1000.0), rates or Rates(), page):
        console.print(line)
    return screen.getvalue()


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        pytest.param(Page(width=80, live=True), NARROW, id="live at 80 columns"),
        pytest.param(Page(width=120, live=True), WIDE, id="live at 120 columns"),
        pytest.param(Page(width=80), PRINTED, id="printed once at 80 columns"),
    ],
)
def test_fleet_is_drawn_so(page: Page, expected: str) -> None:
    assert drawn(INSTANCES, TRANSFERS, page) == expected


@pytest.mark.parametrize("width", [60, 72, 80, 100])
def test_live_view_is_never_wider_than_the_screen(width: int) -> None:
    chain = [transfer(n, f"joiner-{n + 1:040}", {f"joiner-{n:040}": 5}) for n in range(9)]
    fleet = Fleet.of([*INSTANCES, instance("重み" * 20)], [*TRANSFERS, *chain], at=1000.0)
    lines = fleet_lines(fleet, Rates(), Page(width=width, live=True))
    assert max(cell_len(line.plain) for line in lines) <= width


def tree(*transfers: Json, rates: Rates | None = None) -> list[str]:
    text = drawn([], list(transfers), Page(width=80, live=True), rates)
    _, found, lines = text.partition("who feeds whom\n")
    return lines.splitlines() if found else []


def test_target_of_two_sources_stands_below_both_and_its_own_joiner_below_the_main_one() -> None:
    rates = Rates(feeds={(f"{0:024}", "a"): 2e6, (f"{0:024}", "b"): 1e6, (f"{1:024}", "joiner"): 3e6})
    assert tree(
        transfer(0, "joiner", {"a": 20, "b": 10}), transfer(1, "late", {"joiner": 5}), rates=rates
    ) == [
        "a",
        "└─ joiner  receiving  30 %  2.0 MB/s  relay",
        "   └─ late  receiving  30 %  3.0 MB/s  relay",
        "b",
        "└─ joiner  receiving  30 %  1.0 MB/s  relay",
    ]  # fmt: skip


def test_standby_source_stands_in_the_tree_once_it_gives_something() -> None:
    calm = transfer(0, "t", {"source": 10, "spare": 0}, standby={"spare": 2})
    assert tree(calm) == ["source", "└─ t  receiving  30 %  30.0 MB/s"]
    healed = transfer(0, "t", {"source": 10, "spare": 30}, standby={"spare": 2})
    assert tree(healed) == [
        "source", "└─ t  receiving  30 %", "spare", "└─ t  receiving  30 %  relay, standby 2",
    ]  # fmt: skip


def test_several_joiners_of_one_source_hang_on_one_stem() -> None:
    joiners = [transfer(number, f"t{number}", {"source": 0}, done=0, state="planned") for number in range(3)]
    assert tree(*joiners) == ["source", "├─ t0  planned  0 %", "├─ t1  planned  0 %", "└─ t2  planned  0 %"]


def test_ring_that_cannot_be_is_drawn_all_the_same() -> None:
    assert tree(transfer(0, "a", {"b": 1}), transfer(1, "b", {"a": 1})) == [
        "a",
        "└─ b  receiving  30 %  30.0 MB/s  relay",
        "   └─ a  receiving  30 %  30.0 MB/s  relay",
    ]


def test_nothing_that_moves_is_no_tree() -> None:
    assert tree(transfer(0, "t", {"source": 10}, state="ready")) == []


def test_live_view_shows_what_runs_before_the_newest_that_ended() -> None:
    ended = [transfer(number, f"t{number}", {}, state="ready") for number in range(1, 9)]
    text = drawn([], [*ended, transfer(0, "runs", {})], Page(width=120, live=True))
    targets = [line.split()[1] for line in text.splitlines()[1:] if line[:1] == "0"]
    assert targets == ["runs", "t1", "t2", "t3", "t4", "t5"]


def test_empty_service_says_so() -> None:
    assert drawn([], [], Page(width=80)) == "no instance and no transfer is known\n"


def test_one_transfer_is_told_with_its_sources_ranks_and_reasons() -> None:
    ranks = [
        {"rank": 0, "state": "ready", "bytes_total": 500, "bytes_peer": 480, "bytes_disk": 20, "error": None},
        {
            "rank": 1, "state": "failed", "bytes_total": 500, "bytes_peer": 100, "bytes_disk": 0,
            "error": {"code": "source_stalled", "detail": "no bytes for 2 s"},
        },
    ]  # fmt: skip
    item = transfer(
        0, "t", {"source": 480, "spare": 100}, standby={"spare": 1}, state="failed", ranks=ranks, bytes_disk=20,
        reasons=[{"instance_id": "other", "reason": "rank 0 has published nothing"}],
    )  # fmt: skip
    lines = [line.plain for line in transfer_details(transfer_view(item), Rates(), Page(width=80))]
    assert lines[2:] == [
        "  org/llama-3-70b-instruct version 1 to t, 10.0 s",
        "  from source: 480 B",
        "  from spare: 100 B (relay, standby 1)",
        "  from disk: 20 B",
        "  rank 0: ready, 500 B of 500 B",
        "  rank 1: failed, 100 B of 500 B; source_stalled: no bytes for 2 s",
        "  not from other: rank 0 has published nothing",
    ]
