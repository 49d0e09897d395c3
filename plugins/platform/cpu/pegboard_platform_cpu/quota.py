"""How much of the CPUs' time this process may use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def within_quota(num_cpus: int, quota: float | None) -> int:
    """Return how many threads can compute at once: one per CPU that this process may run on, or
    fewer if its quota is smaller. Half a CPU and more is rounded up. More threads than that would
    stand still together for a part of every period."""
    return num_cpus if quota is None else max(1, min(num_cpus, math.floor(quota + 0.5)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return how many CPUs' time the control groups of this process get, or None if they have no
    limit or the system has no control groups. Containers with a limit of CPUs are such groups.

    root: where /proc and /sys are. See cgroups(7): version 2 has a file `cpu.max`, and version 1
    two files. The limit of a group also holds for the groups in it.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    quotas = [
        quota
        for line in lines
        for folder in _folders(root / "sys/fs/cgroup", line)
        if (quota := _quota_of(folder)) is not None
    ]
    return min(quotas, default=None)


def _folders(mount: Path, line: str) -> Iterator[Path]:
    """Yield the folders of a group and of the groups that it is in. In a container, the first ones
    may not exist, because only its own group is mounted.

    line: of /proc/self/cgroup, "0::/path" for version 2 and "4:cpu,cpuacct:/path" for version 1.
    """
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if controllers and "cpu" not in controllers.split(","):
        return
    names = (controllers, "cpu") if controllers else ("", "unified")
    group = PurePosixPath(path.lstrip("/"))
    for name in names:
        for part in (group, *group.parents):
            yield mount / name / part


def _quota_of(folder: Path) -> float | None:
    """Return the limit of a group, or None if it has none."""
    try:
        quota, period = (folder / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text("ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text("ascii").strip()
        except (OSError, ValueError):
            return None
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return None  # "max" or -1
    return int(quota) / int(period)
