"""The features of the CPU that the system lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.env import cpu_flags


@pytest.mark.parametrize(
    "text",
    [
        "processor\t: 0\nflags\t\t: asimd atomics\n\nprocessor\t: 1\nflags\t\t: other\n",
        "processor\t: 0\nFeatures\t: asimd atomics\nCPU implementer\t: 0x41\n",
    ],
)
def test_cpu_flags_are_read_as_x86_and_arm_list_them(text: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_flags(tmp_path / "cpuinfo") == {"asimd", "atomics"}
    assert cpu_flags(tmp_path / "absent") == set()
