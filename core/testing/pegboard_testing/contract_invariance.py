"""What plugins with the flag "batch_invariant" keep: a token has the same bits in every step. The
contract of float weights calls these functions, and so do tests of other products. Attention has
`contract_invariant_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SIZES = (1, 3, 17, 50)
"""Rows of a step."""


def check_rows(call: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int] = SIZES) -> None:
    """Check that a product [T, in] → [T, out] gives each row of x the same bits alone, with others
    and in another order. sizes: of steps; fewer for kernels that are interpreted."""
    expected = call(x)
    for size in sizes:
        parts = torch.cat([call(part) for part in x.split(size)])
        assert torch.equal(parts, expected), f"in steps of {size} rows"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(call(x[order]), expected[order]), "in another order"


def check_experts(
    call: Callable[[Tensor, Tensor], Tensor], x: Tensor, counts: Sequence[int], every: int = 1
) -> None:
    """Check the same of a product of experts, of which each has so many rows of x. every: which
    rows are computed alone."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    expected = call(x, starts)
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    for row, owner in list(enumerate(owners.tolist()))[::every]:
        alone = (torch.arange(len(counts) + 1) > owner).int()
        assert torch.equal(call(x[row : row + 1], alone)[0], expected[row]), f"row {row} alone"
