"""What a process may use: the memory and the cores of its container, not of its machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock_server import machine, settings
from penstock_server.machine import memory_bytes, num_cores
from penstock_server.settings import Settings


def put_groups(root: Path, groups: str | None, files: Mapping[str, str]) -> None:
    """Below a folder what Linux would tell of a process's control groups."""
    contents = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    if groups is not None:
        contents["proc/self/cgroup"] = groups + "\n"
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"memory.max": "5000000\n"}, 5_000_000),
        ("0::/a/b", {"a/memory.max": "6000000\n", "a/b/memory.max": "max\n"}, 6_000_000),
        ("5:cpu:/x\n4:memory:/docker/12", {"memory/memory.limit_in_bytes": "7000000\n"}, 7_000_000),
        ("0::/", {"memory.max": "max\n"}, None),
        (None, {}, None),
    ],
    ids=["container", "group above", "version 1", "no limit", "no groups"],
)
def test_memory_is_that_of_the_container(tmp_path: Path, groups: str | None, files: dict[str, str], limit: int | None) -> None:
    put_groups(tmp_path, groups, files)
    machine = memory_bytes(tmp_path / "none")
    assert machine > 10_000_000
    assert memory_bytes(tmp_path) == (limit or machine)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b", {"a/cpu.max": "5000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),
        (
            "5:cpu,cpuacct:/x\n4:memory:/y",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        ("5:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 64),
        ("0::/", {"cpu.max": "max 100000\n"}, 64),
        ("0::/", {"cpu.max": "9900000 100000\n"}, 64),
        (None, {}, 64),
    ],
)
def test_cores_are_those_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(machine, "_machine_cores", lambda: 64)
    put_groups(tmp_path, groups, files)
    assert num_cores(tmp_path) == cores


def test_cores_are_lowered_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_machine_cores", lambda: 8)
    for text, cores in (("3", 3), ("64", 8), ("0", 1), ("", 8), ("all", 8)):
        monkeypatch.setenv("PENSTOCK_CORES", text)
        assert num_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("cores", "memory", "processes", "threads"),
    [(2, 512 << 20, 1, 2), (64, 4 << 30, 1, 16), (64, 1 << 40, 4, 16), (2, 1 << 30, 4, 1), (1, 1 << 20, 1, 1)],
)
def test_decode_threads_are_limited_by_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory: int, processes: int, threads: int
) -> None:
    monkeypatch.setattr(settings, "num_cores", lambda: cores)
    monkeypatch.setattr(settings, "memory_bytes", lambda: memory)
    assert Settings(data_dir=(Path("d"),), cache_dir=Path("c"), processes=processes).num_decoders == threads
