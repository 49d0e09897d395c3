"""Memory in huge pages."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_kernel_cpu import pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5), torch.float32), ((1025, 2048), torch.bfloat16), ((700, 3001), torch.float16)],
)
def test_the_memory_is_that_of_a_matrix(shape: tuple[int, int], dtype: torch.dtype) -> None:
    memory = pages.matrix(shape, dtype)
    assert memory.shape == shape and memory.dtype == dtype and memory.is_contiguous()
    expected = torch.randn(shape).to(dtype)
    memory.copy_(expected)
    assert torch.equal(memory, expected)
    if memory.nbytes >= pages.HUGE:
        assert memory.data_ptr() % pages.HUGE == 0


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="the system has none"
)
def test_huge_pages_are_asked_for() -> None:
    """The system may have none to give, but it notes who asked ("hg" in VmFlags)."""
    memory = pages.matrix((2048, 1024), torch.float32)
    place = memory.data_ptr()
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if rest and all(letter in "0123456789abcdef" for letter in first):
            is_inside = int(first, 16) <= place < int(rest.split()[0], 16)
        if is_inside and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the memory is not mapped")


def test_without_huge_pages_it_is_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *args: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert pages.matrix((2048, 1024), torch.float32).shape == (2048, 1024)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert pages.matrix((2048, 1024), torch.float32).shape == (2048, 1024)
