"""The CPU quota is the least limit of all control groups that this process is in."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_platform_cpu import platform
from pegboard_platform_cpu.platform import CPUPlatform
from pegboard_platform_cpu.quota import cpu_quota, within_quota

from pegboard.interfaces.platform import PlatformSetup

LIMITS = st.one_of(st.none(), st.integers(1_000, 6_400_000))


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def limit(root: Path, folder: str, version: int, quota: int | None, period: int = 100_000) -> None:
    """Write a group's limit as the system shows it. None = no limit."""
    if version == 2:
        write(root, f"{folder}/cpu.max", f"{'max' if quota is None else quota} {period}\n")
    else:
        write(root, f"{folder}/cpu.cfs_quota_us", f"{-1 if quota is None else quota}\n")
        write(root, f"{folder}/cpu.cfs_period_us", f"{period}\n")


@given(st.sampled_from([1, 2]), st.lists(LIMITS, min_size=1, max_size=4), st.integers(1, 10))
def test_the_least_limit_of_nested_groups_holds(
    version: int, limits: list[int | None], periods: int
) -> None:
    period = periods * 10_000
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        mount = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/cpu,cpuacct"
        names = [f"level{depth}" for depth in range(len(limits))]
        for depth, quota in enumerate(limits):
            limit(root, "/".join([mount, *names[:depth]]), version, quota, period)
        controllers = "0:" if version == 2 else "7:cpu,cpuacct"
        path = "/".join(names[: len(limits) - 1])
        write(root, "proc/self/cgroup", f"9:memory:/elsewhere\n{controllers}:/{path}\n")
        given_limits = [quota for quota in limits if quota is not None]
        expected = min(given_limits) / period if given_limits else None
        assert cpu_quota(root) == expected


def test_in_a_container_only_its_own_group_is_mounted(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "3:cpu:/docker/0123\n")
    limit(tmp_path, "sys/fs/cgroup/cpu", 1, 250_000)
    assert cpu_quota(tmp_path) == 2.5


def test_both_versions_side_by_side(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "1:cpu:/a\n0::/b\n")
    limit(tmp_path, "sys/fs/cgroup/cpu/a", 1, 300_000)
    limit(tmp_path, "sys/fs/cgroup/unified/b", 2, 200_000)
    assert cpu_quota(tmp_path) == 2


@pytest.mark.parametrize("content", ["", "max", "-1 100000", "1 0", "x y", "1 2 3", "\xff"])
def test_what_is_no_limit_is_passed_over(tmp_path: Path, content: str) -> None:
    assert cpu_quota(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    assert cpu_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/cpu.max", content)
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "usable", "expected"),
    [(None, 8, 8), (0.3, 8, 1), (1.4, 8, 1), (1.5, 8, 2), (2.0, 8, 2), (64.0, 8, 8)],
)
def test_threads_that_compute_at_once(quota: float | None, usable: int, expected: int) -> None:
    assert within_quota(usable, quota) == expected


def test_what_the_user_says_goes_before_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "cpu_quota", lambda: 1.0)
    monkeypatch.setattr(platform, "num_cores", lambda cpus: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert CPUPlatform(None, PlatformSetup()).num_threads == 1
    assert CPUPlatform(None, PlatformSetup(num_threads=5)).num_threads == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert CPUPlatform(None, PlatformSetup()).num_threads == 3
