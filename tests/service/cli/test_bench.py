"""`weightwire bench`: its processes and hosts, and small runs of each command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import cast

import pytest

from tests.docs.conftest import Json, differences, page, table
from weightwire.service.cli.bench_faults import fault_cases
from weightwire.service.cli.bench_hosts import bits_per_second, check_possible, open_lab
from weightwire.service.cli.bench_worker import Worker
from weightwire.service.cli.main import run
from weightwire.transfer.errors import SettingsError, SourceUnreachableError

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="network namespaces need root and iproute2"
)
ECHO = "import sys\nfor line in sys.stdin: print('{\"said\": \"' + line.strip() + '\"}', flush=True)"


def documented(name: str) -> Json:
    """The keys that docs/cli.md has of a command that is too slow for its own tests."""
    block = page("cli.md").partition(f"<!-- keys: {name} -->\n```json\n")[2].partition("```")[0]
    value: Json = json.loads(block)
    return value


def test_worker_hears_and_says_lines() -> None:
    with Worker("echo", [sys.executable, "-c", ECHO]) as worker:
        worker.tell("one")
        worker.tell("two")
        assert [worker.hear(), worker.hear()] == [{"said": "one"}, {"said": "two"}]


@pytest.mark.parametrize(
    ("program", "timeout_s", "expected"),
    [
        pytest.param("raise SystemExit(3)", 60.0, "odd ended with exit code 3", id="it ended"),
        pytest.param("import sys; sys.stdin.read()", 0.0, "odd said nothing for 0 s", id="it says nothing"),
    ],
)
def test_worker_that_says_nothing_is_an_error(program: str, timeout_s: float, expected: str) -> None:
    with (
        Worker("odd", [sys.executable, "-c", program]) as worker,
        pytest.raises(SourceUnreachableError, match=expected),
    ):
        worker.hear(timeout_s=timeout_s)


@pytest.mark.parametrize(("rate", "expected"), [("200mbit", 200e6), ("1.5gbit", 1.5e9), ("64kbit", 64e3)])
def test_rate_is_read_as_tc_spells_it(rate: str, expected: float) -> None:
    assert bits_per_second(rate) == expected


@pytest.mark.parametrize("rate", ["", "200", "0mbit", "-1mbit", "200MB", "1e3mbit", "200mbit "])
def test_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(SettingsError, match="such as 200mbit"):
        bits_per_second(rate)


def test_hosts_without_the_programs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match=r"no ip and no tc \(iproute2\); network namespaces .* need root"):
        check_possible()


@needs_hosts
def test_hosts_reach_each_other_and_are_gone_afterwards() -> None:
    with open_lab(2, bits_per_s=1e9) as lab:
        first, second = lab.hosts
        before = lab.bytes_sent(second)
        script = (
            "import socket, sys\nlistener = socket.create_server((sys.argv[1], 7000))\nprint('{}', flush=True)\n"
            "print('{\"peer\": \"' + listener.accept()[1][0] + '\"}', flush=True)"
        )
        with Worker("listener", first.command([sys.executable, "-c", script, first.address])) as listener:
            listener.hear()
            knock = f"import socket; socket.create_connection(('{first.address}', 7000)).close()"
            subprocess.run(second.command([sys.executable, "-c", knock]), check=True)
            assert listener.hear() == {"peer": second.address}
        assert lab.bytes_sent(second) > before
    names = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert first.namespace not in names


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["fanout", "--hosts", "2", "--kill", "3"], "target 3 of 2", id="a target that is not there"),
        pytest.param(["fanout", "--hosts", "1", "--cut", "1"], "no target is left", id="nobody is left"),
        pytest.param(["fanout", "--rate", "fast"], "--rate 'fast'", id="no rate"),
        pytest.param(["faults", "--case", "flood"], "expected one of killed, stopped", id="no such case"),
    ],
)
def test_wrong_usage_is_told_before_anything_starts(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments, "--json"]) == 2
    assert expected in json.loads(capsys.readouterr().out)["error"]["detail"]


@needs_hosts
def test_fanout_fills_every_target_that_nothing_happens_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "fanout", "--hosts", "2", "--mib", "44", "--rate", "1gbit", "--stop", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    first, second = cast("list[dict[str, object]]", answer["per_target"])
    assert (first["host"], first["state"], first["identical"], first["bytes_peer"]) == (1, "ready", True, 44 << 20)
    assert (second["host"], second["state"]) == (2, "stopped")
    assert differences(documented("bench fanout"), answer) == []
    assert answer["ideal_seconds"] == (44 << 23) / 1e9
    assert answer["ratio"] == answer["seconds"] / answer["ideal_seconds"]
    assert answer["error"] is None


def test_fault_that_kills_a_source_at_half_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "faults", "--mib", "16", "--case", "killed", "--rounds", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["case"], answer["ready"], answer["bytes"], answer["error"]) == ("killed", True, 16 << 20, None)
    assert differences(documented("bench faults"), answer) == []
    assert answer["bytes_received"] >= 16 << 20
    assert answer["extra_seconds"] == answer["seconds"] - answer["undisturbed_seconds"]


def test_every_case_is_documented() -> None:
    cases = [case.name for case in fault_cases(1 << 30)]
    assert [name for name, _ in table(page("cli.md"), "`bench faults`", "case")] == cases
