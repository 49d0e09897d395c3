"""What this process takes. Linux counts pages that it has written or read."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""See proc_pid_clear_refs(5)."""


def resident() -> tuple[int, int]:
    """Return how many bytes the process has in memory, and the most that it had since the last
    `reset_peak`."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text("utf-8").splitlines() if line)
    now = int(fields["VmRSS"].split()[0]) * 1024
    peak = int(fields["VmHWM"].split()[0]) * 1024 if "VmHWM" in fields else now
    return now, max(now, peak)


def reset_peak() -> None:
    """Measure the peak from now on. Some containers do not allow it; then the peak stays that of
    the whole process, and the KV cache becomes smaller than it could be."""
    try:
        CLEAR.write_text(RESET_PEAK, "ascii")
    except OSError:
        return
