"""Several ranks on one port: each with its own key and weights, all with one count of readers."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from tests.transfer.conftest import PATIENCE_S, bits, filled
from tests.transfer.wire.conftest import data
from weightwire.transfer.errors import NotFoundError, SourceBusyError, SourceLeavingError, TicketError
from weightwire.transfer.layouts import ModelIdentity
from weightwire.transfer.manifest import Topology
from weightwire.transfer.regions import row_major
from weightwire.transfer.shells import Shells
from weightwire.transfer.tickets import Ticket, claimed_rank, issue_ticket
from weightwire.transfer.wire.framing import ReadRequest
from weightwire.transfer.wire.served_ranks import ServedRanks
from weightwire.transfer.wire.source import Access, Source, SourceIdentity, SourceLimits
from weightwire.transfer.wire.source_server import SourceServer

GENERATION, VERSION = 7, 3
RANKS = (1, 3)
TOKEN = "sesame"
TENSORS = {rank: filled("int16", (4, 2 + rank), seed=rank) for rank in RANKS}


def key(rank: int) -> bytes:
    return bytes([rank]) * 32


def sealed(rank: int) -> Shells:
    identity = ModelIdentity(model="m", topology=Topology(tp=4), rank=rank)
    shells = Shells.from_tensors({"w": TENSORS[rank]}, identity)
    shells.seal()
    return shells


def sources(*, limits: SourceLimits | None = None, access: bool = True, token: bool = False) -> dict[int, Source]:
    made = Source.of_ranks(SourceIdentity(instance_id="s", generation=GENERATION), RANKS, limits)
    opened = frozenset({hashlib.sha256(TOKEN.encode()).hexdigest()}) if token else frozenset[str]()
    for rank, source in made.items():
        if access:
            source.grant_access(Access(ticket_key=key(rank), read_token_sha256=opened))
        source.publish(sealed(rank), weight_version=VERSION)
    return made


def ticket(rank: int, *, signed_for: int | None = None, **changes: str | float) -> str:
    """A ticket for a rank, signed with its key, or with that of another rank."""
    granted = Ticket(
        transfer_id="t",
        source_instance="s",
        source_rank=rank,
        source_generation=GENERATION,
        target_instance="x",
        target_rank=0,
        weight_version=VERSION,
        expires_at=time.time() + 3600,
    )
    return issue_ticket(key(rank if signed_for is None else signed_for), replace(granted, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server of two ranks, and somebody who asks it."""

    server: SourceServer
    client: httpx.Client

    def read(self, text: str, *, of: int, query: str = "") -> httpx.Response:
        """Ask for all bytes of a rank's manifest with a ticket."""
        shells = self.server.sources[of].publication
        assert shells is not None
        request = ReadRequest(
            generation=GENERATION, weight_version=VERSION, manifest=shells.manifest.digest, target_instance="x",
            target_rank=0, regions=(row_major((shells.manifest.total_bytes,)),),
        )  # fmt: skip
        return self.client.post(
            f"/v1/read{query}", content=request.to_bytes(), headers={"Authorization": f"Ticket {text}"}
        )


def code(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json()["status"] == response.status_code
    return response.status_code, str(response.json()["code"])


@pytest.fixture
def served() -> Iterator[Served]:
    with SourceServer(sources()) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        yield Served(server=server, client=client)


def test_read_goes_to_the_rank_of_its_ticket(served: Served) -> None:
    for rank in (*RANKS, *RANKS):
        assert served.read(ticket(rank), of=rank).content == data(bits(TENSORS[rank]))


@pytest.mark.parametrize(("rank", "other"), [(1, 3), (3, 1)])
def test_ticket_of_one_rank_opens_no_other(served: Served, rank: int, other: int) -> None:
    """Neither with the claim changed, nor signed with the neighbour's key, nor by asking for its manifest."""
    claims, _, signature = ticket(rank).partition(".")
    swapped = f"{ticket(other).partition('.')[0]}.{signature}"
    for forged in (swapped, ticket(other, signed_for=rank), f"{claims}.{ticket(other).partition('.')[2]}"):
        assert code(served.read(forged, of=other)) == (403, "ticket_invalid")
    assert code(served.read(ticket(rank), of=other)) == (409, "source_fenced")


def test_forged_tickets_of_served_ranks_are_told_apart_by_nothing(served: Served) -> None:
    told = {
        served.read(ticket(rank, signed_for=0, **changes), of=rank).json()["detail"]
        for rank in RANKS
        for changes in ({}, {"expires_at": 1.0}, {"source_instance": "y"}, {"target_instance": "z"})
    }
    assert len(told) == 1


@pytest.mark.parametrize("rank", [0, 2, 4, -1, 10**30])
def test_ticket_for_a_rank_that_is_elsewhere_names_it_and_those_here(served: Served, rank: int) -> None:
    reply = served.read(ticket(rank, signed_for=1), of=1)
    assert code(reply) == (403, "ticket_invalid")
    assert f"rank {rank}"[:25] in reply.json()["detail"]
    assert "serves 1, 3 here" in reply.json()["detail"]


def test_ticket_of_the_key_before_stays_good_for_its_rank_alone(served: Served) -> None:
    served.server.sources[3].grant_access(Access(ticket_key=b"new" * 8))
    assert served.read(ticket(3), of=3).status_code == 200
    assert code(served.read(ticket(1, signed_for=3), of=1)) == (403, "ticket_invalid")


def test_read_takes_no_query(served: Served) -> None:
    assert code(served.read(ticket(1), of=1, query="?rank=1")) == (400, "request_invalid")


def test_get_routes_take_a_rank_and_without_one_the_lowest(served: Served) -> None:
    for query, rank in (("", 1), ("?rank=1", 1), ("?rank=3", 3), ("?rank=003", 3), ("?", 1)):
        assert served.client.get(f"/v1/tensors/w{query}").content == bits(TENSORS[rank])
        exported = load(served.client.get(f"/v1/export.safetensors{query}").content)
        assert bits(exported["w"]) == bits(TENSORS[rank])
        assert served.client.head(f"/v1/tensors/w{query}").headers["Content-Length"] == str(TENSORS[rank].nbytes)


ROUTES = ["/v1/tensors/w", "/v1/export.safetensors", "/readyz"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "query",
    ["rank", "rank=", "rank=-1", "rank=x", "rank=1&rank=3", "rank=1&x=2", "x=1", "rank=%31", "rank=1.0", "rank= 1",
     "RANK=1", "rank=²", f"rank={'1' * 5000}", "rank=1&", "&rank=1"],
)  # fmt: skip
def test_query_that_is_no_rank_is_a_bad_request(served: Served, path: str, query: str) -> None:
    response = served.client.get(f"{path}?{query}")
    assert code(response) == (400, "request_invalid")
    assert len(response.content) < 1000
    assert served.client.get(path).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
def test_rank_that_is_not_here_is_not_found_and_those_here_are_named(served: Served, path: str) -> None:
    response = served.client.get(f"{path}?rank=2")
    assert code(response) == (404, "not_found")
    assert (response.json()["kind"], response.json()["name"]) == ("rank", "2")
    assert "serves 1, 3 here" in response.json()["detail"]


def test_stranger_learns_nothing_of_ranks_without_a_token() -> None:
    with SourceServer(sources(token=True)) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        for query in ("", "?rank=1", "?rank=2", "?x=1"):
            for path in ROUTES[:2]:
                assert code(client.get(path + query)) == (401, "unauthorized")
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/v1/tensors/w?rank=3", headers=bearer).content == bits(TENSORS[3])


def test_server_is_ready_when_all_ranks_are(served: Served) -> None:
    get = served.client.get
    assert get("/readyz").json() == {"status": "ready", "weight_version": VERSION, "ranks": [1, 3]}
    served.server.sources[3].withdraw()
    assert code(get("/readyz")) == (503, "source_busy")
    assert "rank 3" in get("/readyz").json()["detail"]
    assert get("/readyz?rank=1").json()["ranks"] == [1]
    assert code(get("/readyz?rank=3")) == (503, "source_busy")
    assert served.client.get("/v1/tensors/w").status_code == 200
    served.server.sources[3].publish(sealed(3), weight_version=VERSION + 1)
    assert get("/readyz").json() == {"status": "ready", "weight_version": VERSION, "ranks": [1, 3]}


def test_readers_are_counted_for_the_process_not_for_the_rank() -> None:
    made = sources(limits=SourceLimits(max_readers=2))
    with made[3].reading(), made[3].reading(), pytest.raises(SourceBusyError, match="2 readers"), made[1].reading():
        pass
    with (
        SourceServer(made) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
        made[1].reading(),
        made[3].reading(),
    ):
        for rank in RANKS:
            response = client.get(f"/v1/tensors/w?rank={rank}")
            assert code(response) == (503, "source_busy")
            assert response.headers["Retry-After"] == "1"
    assert [source.active_readers for source in made.values()] == [0, 0]


def test_readers_that_are_refused_take_no_seat() -> None:
    made = sources(limits=SourceLimits(max_readers=1))
    made[1].withdraw()
    for _ in range(3):
        with pytest.raises(SourceLeavingError), made[1].reading():
            pass
    with made[3].reading():
        pass


def test_stop_lets_nobody_in_while_readers_of_another_rank_finish() -> None:
    made = sources()
    server = SourceServer(made)
    server.start()
    with made[1].reading():
        stopping = threading.Thread(target=server.stop, kwargs={"drain_s": PATIENCE_S})
        stopping.start()
        while made[1].publication is not None or made[3].publication is not None:
            assert stopping.is_alive()
        with pytest.raises(SourceLeavingError, match="takes its weights back"), made[3].reading():
            pass
        assert stopping.is_alive()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()


# What goes together


def test_ranks_of_one_process_have_its_generation_and_their_own_numbers() -> None:
    made = Source.of_ranks(SourceIdentity(instance_id="s"), (3, 1))
    assert {rank: source.identity.rank for rank, source in made.items()} == {3: 3, 1: 1}
    assert len({source.identity.generation for source in made.values()}) == 1
    ranks = ServedRanks(made)
    assert list(ranks.sources) == [1, 3]
    assert ranks.find(None) is ranks.lowest is made[1]
    assert ranks.find(3) is made[3]
    with pytest.raises(NotFoundError, match="rank 2"):
        ranks.find(2)


def apart() -> Mapping[int, Source]:
    return {rank: Source(SourceIdentity(instance_id="s", rank=rank, generation=1)) for rank in (0, 1)}


def strangers() -> Mapping[int, Source]:
    return {0: Source(SourceIdentity(instance_id="s")), 1: Source(SourceIdentity(instance_id="t", rank=1))}


@pytest.mark.parametrize(
    "made",
    [
        pytest.param({}, id="none at all"),
        pytest.param({1: Source(SourceIdentity(instance_id="s", rank=0))}, id="under another number than its own"),
        pytest.param(apart(), id="with readers counted apart"),
        pytest.param(strangers(), id="of two instances"),
    ],
)
def test_ranks_that_are_not_of_one_process_are_refused_before_a_port_is_taken(made: Mapping[int, Source]) -> None:
    with pytest.raises(ValueError, match=r"expected|stands for"):
        SourceServer(made)


def test_source_alone_is_its_own_rank() -> None:
    source = Source(SourceIdentity(instance_id="s", rank=5, generation=GENERATION))
    assert ServedRanks(source).sources == {5: source}


# Choosing the key


def test_tickets_claim_is_read_and_nothing_is_trusted() -> None:
    assert claimed_rank(ticket(3)) == 3
    assert claimed_rank(ticket(3).partition(".")[0]) == 3


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_text_that_is_no_ticket_claims_no_rank_and_is_refused(text: str) -> None:
    assert claimed_rank(text) is None
    with pytest.raises(TicketError):
        ServedRanks(sources()).check_ticket(text)


def test_ticket_for_a_rank_that_no_service_knows_yet_is_to_come_back() -> None:
    ranks = ServedRanks(sources(access=False))
    with pytest.raises(SourceBusyError, match="rank 3: not registered"):
        ranks.check_ticket(ticket(3))
    with pytest.raises(SourceBusyError, match="rank 1: not registered"):
        ranks.check_ticket("nonsense")
