"""Tests of the program that measures the rates of the CPU kernels (rates.py), with few weights."""

import pytest

pytest.importorskip("pegboard_kernel_cpu")
import rates
import torch
from pegboard_kernel_cpu.build import compiler, usable_levels
from pegboard_kernel_cpu.library import using

from pegboard.env import cpu_flags

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "WEIGHTS", 1)
    monkeypatch.setattr(rates, "RUN_S", 0.001)
    monkeypatch.setattr(rates, "ROUNDS", 100)


def test_every_format_gets_a_row_below_the_peaks() -> None:
    level = usable_levels(cpu_flags())[0]
    with using(level, 1):
        text = rates.section(level, list(rates.ROUNDED), (1, 3), 1)
    assert text.startswith(f"`{level}`, peaks in GOP/s: ")
    assert "float32" in text.splitlines()[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[4:]]
    assert [row[0] for row in rows] == list(rates.ROUNDED)
    assert all(float(cell.replace(",", "")) >= 0 for row in rows for cell in row[1:])


@pytest.mark.parametrize("name", rates.ROUNDED)
def test_formats_are_near_the_matrix(name: str) -> None:
    """A wrong scale would measure numbers that overflow."""
    matrix = torch.randn(64, 576) / 24
    rounded = rates.ROUNDED[name](matrix)
    dense = rounded.float() if isinstance(rounded, torch.Tensor) else rounded.dense()
    assert (dense - matrix).norm() < 0.15 * matrix.norm()
