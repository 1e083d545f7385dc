"""The sweeper: what is over ends and what nobody needs goes, also when nobody looks."""

from __future__ import annotations

import pytest

from tests.service.conftest import Api, Clock, MakeApi, make_manifest, progress
from weightwire.service.sweeper import sweep


@pytest.fixture
def forgetful(make_api: MakeApi) -> Api:
    return make_api(keep_transfers_s=100, keep_manifests_s=50, keep_instances_s=30)


def test_sweep_ends_transfers_whose_deadline_passed(forgetful: Api, clock: Clock) -> None:
    forgetful.grant(deadline_s=5)
    parts = forgetful.app.state.components
    clock.pass_(4)
    sweep(parts)
    assert parts.transfers.states() == {"planned": 1}
    clock.pass_(1)
    sweep(parts)
    assert parts.transfers.states() == {"failed": 1}


def test_sweep_forgets_instances_transfers_and_manifests_in_their_time(forgetful: Api, clock: Clock) -> None:
    manifest = make_manifest()
    forgetful.register("s1").raise_for_status()
    forgetful.publish(manifest).raise_for_status()
    transfer_id = forgetful.grant(deadline_s=60).json()["transfer_id"]
    forgetful("POST", f"/v1/transfers/{transfer_id}/ranks/0/progress", body=progress("receiving")).raise_for_status()
    parts = forgetful.app.state.components

    def known() -> list[bool]:
        sweep(parts)
        paths = ("/v1/instances/s1", f"/v1/manifests/{manifest.digest}", f"/v1/transfers/{transfer_id}")
        return [forgetful("GET", path).status_code == 200 for path in paths]

    assert known() == [True, True, True]
    clock.pass_(44)
    assert known() == [True, True, True], "the lease ran out 29 s ago"
    clock.pass_(1)
    assert known() == [False, True, True], "and now 30 s ago, so the transfer is cancelled with its target"
    assert forgetful("GET", f"/v1/transfers/{transfer_id}").json()["state"] == "cancelled"
    clock.pass_(49)
    assert known() == [False, True, True]
    clock.pass_(1)
    assert known() == [False, False, True], "nobody has referred to the manifest for 50 s"
    clock.pass_(50)
    assert known() == [False, False, False]
