"""Who may do what: tokens at the service and at sources, tickets at sources."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import torch

from tests.faults.checkpoints import check_saved
from tests.faults.conftest import Model
from tests.faults.processes import Json, Lab
from weightwire.service.client import RankBinding, ServiceClient
from weightwire.transfer import Access, Endpoint, Shells, Source, SourceIdentity, SourceServer, Topology
from weightwire.transfer.tickets import Ticket, issue_ticket

ADMIN, READER = "admin-token-of-the-test", "reader-token-of-the-test"


@pytest.fixture
def guarded(lab: Lab) -> Lab:
    """A lab whose service asks for tokens."""
    lab.serve("--read-token", READER, env={"WEIGHTWIRE_TOKEN": ADMIN})
    return lab


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        pytest.param((), "unauthorized", id="no token"),
        pytest.param(("--token", "wrong"), "unauthorized", id="a wrong token"),
        pytest.param(("--token", READER), "forbidden", id="a token that only reads"),
    ],
)
def test_service_lets_nobody_in_without_the_admin_token(
    guarded: Lab, small: Model, flags: tuple[str, ...], code: str
) -> None:
    for running in (guarded.source(small.folder, *flags), guarded.pull("--checkpoint", small.folder, *flags)):
        outcome = running.finish()
        outcome.check(1)
        assert outcome.error["code"] == code
    with ServiceClient(guarded.service, token=ADMIN) as client:
        assert client.instances() == []


def test_transfer_runs_with_the_admin_token_and_no_log_tells_a_secret(
    guarded: Lab, small: Model, tmp_path: Path
) -> None:
    environment = {"WEIGHTWIRE_TOKEN": ADMIN}
    source = guarded.source(small.folder, "--log-level", "debug", env=environment)
    assert source.line()["ready"] is True
    target = guarded.pull("--save", tmp_path / "out", "--log-level", "debug", env=environment)
    outcome = target.finish()
    assert outcome.check(0)["bytes_peer"] == small.nbytes
    check_saved(tmp_path / "out", small.tensors)
    with ServiceClient(guarded.service, token=ADMIN) as client:
        ticket = granted(client, guarded.model).ticket
    for log in (source.log, outcome.log, "".join(outcome.lines)):
        for secret in (ADMIN, READER, ticket[:40]):
            assert secret not in log


def test_read_token_opens_what_reads_and_nothing_else(guarded: Lab, small: Model) -> None:
    source = guarded.source(small.folder, "--token", ADMIN)
    source.line()
    transfer_id = str(guarded.pull("--token", ADMIN).finish().check(0)["transfer_id"])
    common = ("--service", guarded.service, "--json", "--token", READER)
    assert guarded.run("status", transfer_id, *common).check(0)["state"] == "ready"
    outcome = guarded.run("cancel", transfer_id, *common)
    outcome.check(1)
    assert outcome.error["code"] == "forbidden"


@pytest.mark.parametrize("path", ["/v1/tensors/layers.0.scale", "/v1/export.safetensors"])
@pytest.mark.parametrize(
    ("token", "status"),
    [
        pytest.param(None, 401, id="no token"),
        pytest.param("wrong", 401, id="a wrong token"),
        pytest.param(READER, 200, id="the read token"),
        pytest.param(ADMIN, 200, id="the admin token"),
    ],
)
def test_source_opens_its_tensors_to_tokens_of_the_service(
    guarded: Lab, small: Model, path: str, token: str | None, status: int
) -> None:
    url = str(guarded.source(small.folder, "--token", ADMIN).line()["url"])
    response = httpx.get(url + path, headers={"Authorization": f"Bearer {token}"} if token else {})
    assert response.status_code == status
    if status == 401:
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.json()["code"] == "unauthorized"
    assert httpx.get(f"{url}/healthz").status_code == 200


def test_service_without_a_token_binds_this_machine_only(lab: Lab) -> None:
    outcome = lab.run("serve", "--host", "0.0.0.0", "--port", 0, "--json")
    outcome.check(2)
    assert outcome.error["code"] == "settings_invalid"
    assert "token" in str(outcome.error["detail"])


def granted(client: ServiceClient, model: str, target: str = "target") -> Endpoint:
    """Where a target that is registered for it may read, and its ticket."""
    binding = RankBinding(instance_id=target, generation=1)
    client.register(binding, model=model, revision=None, topology=Topology())
    grant = client.create_transfer(binding, model=model, revision=None, deadline_s=60.0)
    return grant.sources[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A request of a target, written by hand. Source: docs/protocol.md."""

    url: str
    authorization: str | None
    generation: int
    weight_version: int
    manifest: str
    instance_id: str
    rank: int = 0

    @classmethod
    def of(cls, endpoint: Endpoint) -> Read:
        return cls(
            url=endpoint.url,
            authorization=f"Ticket {endpoint.ticket}",
            generation=endpoint.generation,
            weight_version=endpoint.weight_version,
            manifest=endpoint.manifest,
            instance_id=endpoint.target_instance,
        )

    def send(self) -> tuple[int, Mapping[str, str], bytes]:
        body: Json = {
            "generation": self.generation,
            "weight_version": self.weight_version,
            "manifest": self.manifest,
            "target": {"instance_id": self.instance_id, "rank": self.rank},
            "regions": [[0, 1000]],
        }
        headers = {"Authorization": self.authorization} if self.authorization else {}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        connection.request("POST", "/v1/read", body=json.dumps(body), headers=headers)
        response = connection.getresponse()
        found = response.status, dict(response.getheaders()), response.read()
        connection.close()
        return found


def refused(read: Read) -> tuple[int, str]:
    """Status and code of a refusal, which is a problem document."""
    status, headers, body = read.send()
    assert headers["Content-Type"] == "application/problem+json"
    return status, str(json.loads(body)["code"])


@pytest.fixture
def read(served: Lab, small: Model) -> Read:
    """A read that a source would answer."""
    served.ready_source(small.folder, "--instance-id", "source")
    with ServiceClient(served.service) as client:
        return Read.of(granted(client, served.model))


def test_source_answers_a_read_with_its_ticket(read: Read) -> None:
    status, _, body = read.send()
    assert status == 200
    # One frame: header, payload, trailer.
    assert len(body) == 8 + 1000 + 12


def test_source_refuses_a_read_without_ticket(read: Read) -> None:
    for authorization in (None, "", "Ticket", "Bearer something", "Bearer " + str(read.authorization).split()[1]):
        assert refused(replace(read, authorization=authorization)) == (401, "unauthorized")


def test_source_refuses_a_ticket_that_was_changed(read: Read) -> None:
    claims, _, signature = str(read.authorization).removeprefix("Ticket ").partition(".")
    changed = [
        f"{claims}.{'A' * len(signature)}",
        f"{claims[:-2]}{'A' if claims[-2] != 'A' else 'B'}{claims[-1]}.{signature}",
        f"{claims}.",
        claims,
        f".{signature}",
        "nonsense",
        "é",
    ]
    for ticket in changed:
        assert refused(replace(read, authorization=f"Ticket {ticket}")) == (403, "ticket_invalid"), ticket


def test_source_refuses_a_ticket_that_is_used_for_somebody_else(read: Read) -> None:
    assert refused(replace(read, rank=1)) == (403, "ticket_invalid")
    assert refused(replace(read, instance_id="somebody-else")) == (403, "ticket_invalid")
    assert refused(replace(read, weight_version=read.weight_version + 1)) == (403, "ticket_invalid")


def test_source_refuses_a_ticket_for_another_source(served: Lab, small: Model, read: Read) -> None:
    url = str(served.source(small.folder, "--instance-id", "another").line()["url"])
    assert refused(replace(read, url=url)) == (403, "ticket_invalid")


def test_source_fences_off_a_read_meant_for_another_process_or_manifest(read: Read) -> None:
    assert refused(replace(read, generation=read.generation - 1)) == (409, "source_fenced")
    assert refused(replace(read, manifest="0" * 64)) == (409, "source_fenced")


def test_source_b37_refuses_the_ticket_of_the_process_before_it(served: Lab, small: Model) -> None:
    first = served.ready_source(small.folder, "--instance-id", "phoenix")
    with ServiceClient(served.service) as client:
        old = Read.of(granted(client, served.model))
        first.kill()
        served.ready_source(small.folder, "--instance-id", "phoenix")
        new = Read.of(granted(client, served.model, "later"))
    assert new.generation > old.generation
    assert refused(replace(old, url=new.url)) == (403, "ticket_invalid")
    assert refused(replace(old, url=new.url, generation=new.generation)) == (403, "ticket_invalid")
    assert new.send()[0] == 200


KEY = bytes(range(32))


@pytest.fixture
def own() -> Iterator[tuple[Read, Ticket]]:
    """A source without a service, and a ticket for it that is good for a minute."""
    shells = Shells.from_tensors({"w": torch.arange(1000, dtype=torch.int64)})
    shells.seal()
    source = Source(SourceIdentity(instance_id="source"))
    source.publish(shells, weight_version=1)
    source.grant_access(Access(ticket_key=KEY))
    ticket = Ticket(
        transfer_id="t",
        source_instance="source",
        source_rank=0,
        source_generation=source.identity.generation,
        target_instance="target",
        target_rank=0,
        weight_version=1,
        expires_at=time.time() + 60,
    )
    with SourceServer(source) as server:
        yield (
            Read(
                url=server.url,
                authorization=f"Ticket {issue_ticket(KEY, ticket)}",
                generation=source.identity.generation,
                weight_version=1,
                manifest=shells.manifest.digest,
                instance_id="target",
            ),
            ticket,
        )


def test_source_refuses_a_ticket_that_expired(own: tuple[Read, Ticket]) -> None:
    read, ticket = own
    assert read.send()[0] == 200
    expired = issue_ticket(KEY, replace(ticket, expires_at=time.time() - 1))
    status, _, body = replace(read, authorization=f"Ticket {expired}").send()
    assert (status, json.loads(body)["code"]) == (403, "ticket_invalid")
    assert "expired" in json.loads(body)["detail"]


def test_source_refuses_a_ticket_for_another_rank_or_generation_of_itself(own: tuple[Read, Ticket]) -> None:
    read, ticket = own
    for other in (
        replace(ticket, source_rank=1),
        replace(ticket, source_generation=ticket.source_generation - 1),
        replace(ticket, source_instance="another"),
    ):
        signed = issue_ticket(KEY, other)
        assert refused(replace(read, authorization=f"Ticket {signed}")) == (403, "ticket_invalid")


def test_source_refuses_a_ticket_of_a_key_that_it_never_had(own: tuple[Read, Ticket]) -> None:
    read, ticket = own
    signed = issue_ticket(bytes(32), ticket)
    assert refused(replace(read, authorization=f"Ticket {signed}")) == (403, "ticket_invalid")
