"""Whether there is memory, by the kernel's own figures in files of its own form."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightwire.transfer import admission
from weightwire.transfer.admission import available_bytes, check_memory
from weightwire.transfer.errors import AdmissionError

MEMINFO = "MemTotal:       32000 kB\nMemFree:         100 kB\nMemAvailable:   2000 kB\n"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the kernel's, without a limit on this process."""
    for name, constant in {
        "meminfo": "_MEMINFO",
        "memory.max": "_CGROUP_MAX",
        "memory.current": "_CGROUP_CURRENT",
        "memory.stat": "_CGROUP_STAT",
    }.items():
        monkeypatch.setattr(admission, constant, tmp_path / name)
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path


def limit(kernel: Path, *, maximum: str, current: int, inactive_file: int = 0) -> None:
    (kernel / "memory.max").write_text(f"{maximum}\n")
    (kernel / "memory.current").write_text(f"{current}\n")
    (kernel / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\nactive_file 7\n")


def test_memory_is_what_the_machine_has(kernel: Path) -> None:
    assert available_bytes() == 2000 * 1024


def test_memory_is_what_the_limit_leaves_if_that_is_less(kernel: Path) -> None:
    limit(kernel, maximum="5000", current=3000)
    assert available_bytes() == 2000


def test_memory_counts_what_the_page_cache_gives_back(kernel: Path) -> None:
    """A checkpoint that was just read fills a container's limit with pages that nobody needs."""
    limit(kernel, maximum="5000", current=4900, inactive_file=4000)
    assert available_bytes() == 4100


def test_memory_is_never_less_than_nothing(kernel: Path) -> None:
    limit(kernel, maximum="5000", current=6000)
    assert available_bytes() == 0


def test_limit_above_the_machine_does_not_count(kernel: Path) -> None:
    limit(kernel, maximum=str(2**50), current=0)
    assert available_bytes() == 2000 * 1024


def test_no_limit_is_no_limit(kernel: Path) -> None:
    limit(kernel, maximum="max", current=3000)
    assert available_bytes() == 2000 * 1024


def test_limit_without_statistics_counts_all_that_is_used(kernel: Path) -> None:
    limit(kernel, maximum="5000", current=3000)
    (kernel / "memory.stat").unlink()
    assert available_bytes() == 2000


def test_kernel_that_gives_no_figures_refuses_nothing(kernel: Path) -> None:
    (kernel / "meminfo").unlink()
    assert available_bytes() is None
    check_memory(2**62, purpose="anything")


def test_kernel_of_an_old_form_refuses_nothing(kernel: Path) -> None:
    (kernel / "meminfo").write_text("MemTotal: 1 kB\n")
    (kernel / "memory.max").write_text("nonsense")
    (kernel / "memory.current").write_text("nonsense")
    assert available_bytes() is None


def test_more_than_there_is_is_refused_with_the_sum(kernel: Path) -> None:
    check_memory(2000 * 1024, purpose="shells")
    with pytest.raises(AdmissionError, match=r"shells: needs 2048001 bytes of memory, 2048000") as caught:
        check_memory(2000 * 1024 + 1, purpose="shells")
    assert caught.value.facts == {"needed_bytes": 2048001, "available_bytes": 2048000, "diagnostic": "D12"}


def test_this_machine_has_some_memory() -> None:
    check_memory(1, purpose="a byte")
