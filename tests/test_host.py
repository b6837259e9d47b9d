"""What a process may use of the machine: no more than its container is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import host


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def test_without_limits_it_is_the_machines(cgroup: Path) -> None:
    assert host.cores() == 8
    machine = host.memory_bytes()
    assert machine > 2**28
    (cgroup / "cpu.max").write_text("max 100000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert (host.cores(), host.memory_bytes()) == (8, machine)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu.max": "nonsense\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_share_of_processor_time_is_so_many_cores(cgroup: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (cgroup / name).parent.mkdir(exist_ok=True)
        (cgroup / name).write_text(text)
    assert host.cores() == cores


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_is_the_containers_if_that_has_less(cgroup: Path, name: str) -> None:
    (cgroup / name).parent.mkdir(exist_ok=True)
    for limit in (2**27, 2**62):
        (cgroup / name).write_text(f"{limit}\n")
        assert (host.memory_bytes() == limit) == (limit == 2**27)
