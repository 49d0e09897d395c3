"""The products of adapters against the op's reference."""

from __future__ import annotations

import pytest
import torch
from pegboard_kernel_cpu.lora import lora_add

from pegboard import ops
from pegboard_testing.fake_build import adapter_rows

RANKS = [20, 3, 0, 16, 17]
COLUMNS, MAX_RANK, WIDTH = 70, 20, 32


@pytest.mark.parametrize("is_lookup", [False, True])
@pytest.mark.parametrize("bounds", [(0, 40), (0, 64, 96, 133)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_mix_of_adapters(dtype: torch.dtype, bounds: tuple[int, ...], is_lookup: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = len(bounds) - 1
    a = torch.zeros(len(RANKS), COLUMNS, parts, WIDTH, dtype=dtype)
    b = torch.zeros(len(RANKS), MAX_RANK, bounds[-1], dtype=dtype)
    for slot, rank in enumerate(RANKS):
        a[slot, :, :, :rank] = torch.randn(COLUMNS, parts, rank, generator=generator)
        b[slot, :rank] = torch.randn(rank, bounds[-1], generator=generator)
    matrices = a.flatten(2), b, torch.tensor(RANKS, dtype=torch.int32), bounds
    for num_rows in (1, 5, 33, 100):
        slots = torch.randint(0, len(RANKS) + 1, (num_rows,), generator=generator).tolist()
        rows = adapter_rows(slots, len(RANKS))
        x = torch.randint(0, COLUMNS, (num_rows,)) if is_lookup else torch.randn(num_rows, COLUMNS, generator=generator)
        y = torch.randn(num_rows, bounds[-1], generator=generator)
        found = lora_add(y.clone(), x, *matrices, rows)
        torch.testing.assert_close(found, ops.lora_add(y.clone(), x, *matrices, rows), atol=1e-4, rtol=1e-4)
        for i in range(num_rows):
            alone = lora_add(y[i : i + 1].clone(), x[i : i + 1], *matrices, adapter_rows(slots[i : i + 1], len(RANKS)))
            assert torch.equal(found[i : i + 1], alone), "a row gets the same bits in every batch"
