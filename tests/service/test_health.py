"""Probes and metrics: they say what is, within a bound, and count each byte once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.service.conftest import Api, Clock, MakeApi, make_manifest, progress
from weightwire.service.metrics import Figures, Metrics
from weightwire.service.store import MemoryStore, Transaction
from weightwire.transfer.errors import TransferError


def samples(api: Api) -> dict[str, float]:
    """The metrics by name and labels, without the times at which they were made."""
    response = api("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.rpartition(" ") for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines if "_created" not in name and "_bucket" not in name}


class Hanging:
    """A store whose transactions hang while the test wants it so, or fail."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.fails = False
        self._store = MemoryStore()

    def transaction(self) -> AbstractContextManager[Transaction]:
        return self._transaction()

    @contextmanager
    def _transaction(self) -> Iterator[Transaction]:
        self.go.wait()
        if self.fails:
            raise TransferError("store: disk I/O error")
        with self._store.transaction() as transaction:
            yield transaction

    def close(self) -> None:
        return


def test_healthz_and_readyz_are_well(api: Api) -> None:
    assert api("GET", "/healthz").json() == {"live": True}
    assert api("GET", "/readyz").json() == {"ready": True, "reason": None}


def test_readyz_says_that_the_store_fails(make_api: MakeApi) -> None:
    store = Hanging()
    api = make_api(store=store)
    store.fails = True
    response = api("GET", "/readyz")
    assert (response.status_code, response.json()) == (503, {"ready": False, "reason": "store: disk I/O error"})
    assert api("GET", "/healthz").status_code == 200


def test_b60_readyz_sees_a_wedged_store_within_its_bound(make_api: MakeApi) -> None:
    store = Hanging()
    api = make_api(store=store, ready_timeout_s=0.05)
    store.go.clear()
    try:
        response = api("GET", "/readyz")
        assert response.status_code == 503
        assert response.json()["reason"] == "store: does not answer within 0.05 s"
        assert api("GET", "/healthz").status_code == 200
    finally:
        store.go.set()
    assert api("GET", "/readyz").status_code == 200


def test_metrics_of_a_service_where_nothing_happened(api: Api) -> None:
    assert samples(api) == {
        'weightwire_bytes_total{origin="peer"}': 0,
        'weightwire_bytes_total{origin="disk"}': 0,
        'weightwire_transfers{state="planned"}': 0,
        'weightwire_transfers{state="receiving"}': 0,
        'weightwire_transfers{state="verifying"}': 0,
        'weightwire_transfers{state="ready"}': 0,
        'weightwire_transfers{state="failed"}': 0,
        'weightwire_transfers{state="cancelled"}': 0,
        "weightwire_active_readers": 0,
        "weightwire_leases": 0,
        "weightwire_transfer_seconds_count": 0,
        "weightwire_transfer_seconds_sum": 0,
    }


def test_b60_metrics_after_a_history_tell_what_happened(api: Api, clock: Clock) -> None:
    api.register("s1").raise_for_status()
    api.publish(make_manifest()).raise_for_status()
    report: Callable[..., object] = lambda transfer, **fields: api(  # noqa: E731
        "POST", f"/v1/transfers/{transfer}/ranks/0/progress", body=progress(**fields)
    ).raise_for_status()

    ready = api.grant().json()["transfer_id"]
    clock.pass_(2)
    report(ready, peer=16)
    report(ready, peer=16)
    report(ready, peer=8, disk=8)
    report(ready, state="ready", peer=16, disk=16)
    report(ready, state="ready", peer=16, disk=16)

    cancelled = api.grant().json()["transfer_id"]
    report(cancelled, peer=4)
    api("DELETE", f"/v1/transfers/{cancelled}").raise_for_status()
    report(cancelled, peer=32)

    failed = api.grant().json()["transfer_id"]
    report(failed, state="failed", error={"code": "checksum_mismatch", "detail": "x"})
    invented = api.grant().json()["transfer_id"]
    report(invented, state="failed", error={"code": "invented\n", "detail": "x"})
    late = api.grant(deadline_s=1).json()["transfer_id"]
    clock.pass_(1)
    report(late, peer=32)
    running = api.grant().json()["transfer_id"]
    report(running, peer=1)
    assert api("GET", "/v1/transfers/nobody").status_code == 404

    assert samples(api) == {
        'weightwire_bytes_total{origin="peer"}': 16 + 4 + 1,
        'weightwire_bytes_total{origin="disk"}': 16,
        'weightwire_transfers{state="planned"}': 0,
        'weightwire_transfers{state="receiving"}': 1,
        'weightwire_transfers{state="verifying"}': 0,
        'weightwire_transfers{state="ready"}': 1,
        'weightwire_transfers{state="failed"}': 3,
        'weightwire_transfers{state="cancelled"}': 1,
        'weightwire_errors_total{code="cancelled"}': 1,
        'weightwire_errors_total{code="checksum_mismatch"}': 1,
        'weightwire_errors_total{code="transfer_failed"}': 1,
        'weightwire_errors_total{code="deadline_exceeded"}': 1,
        'weightwire_errors_total{code="not_found"}': 1,
        "weightwire_active_readers": 1,
        "weightwire_leases": 2,
        "weightwire_transfer_seconds_count": 1,
        "weightwire_transfer_seconds_sum": 2,
    }


def test_metrics_count_leases_that_are_live(api: Api, clock: Clock) -> None:
    api.register("s1").raise_for_status()
    clock.pass_(10)
    api.register("s2").raise_for_status()
    assert samples(api)["weightwire_leases"] == 2
    clock.pass_(5)
    assert samples(api)["weightwire_leases"] == 1


def test_metrics_do_not_read_the_store_until_asked() -> None:
    def read_figures() -> Figures:
        raise AssertionError("was read")

    Metrics(read_figures)
