"""Ops of tokens with several vectors, compared with their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu import streams

from pegboard_models import streams as reference

pytestmark = pytest.mark.usefixtures("native")


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 5), st.sampled_from([8, 40, 64, 100]), st.integers(1, 30), st.integers(0, 99))
def test_streams_are_those_of_the_references(count: int, size: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows = random(tokens, count * size)
    computed = random(tokens, size)
    # rows of a wider matrix
    routed = random(tokens, 3 * size)[:, size : 2 * size] * size**0.5
    router = random(count, size)
    active = seed % count
    calls = [
        ("predict_streams", (rows, routed, router, random(count**2, count))),
        ("correct_streams", (rows, computed, routed, router, random(count, count), active)),
        ("add_to_streams", (rows, computed)),
        ("match_magnitude", (computed, routed)),
        ("match_magnitude", (computed * 1e-4, routed)),
        ("cut_gates", (random(tokens, 2 * size), 1.3)),
    ]
    for name, given_to in calls:
        before = [x.clone() for x in given_to if isinstance(x, torch.Tensor)]
        found = getattr(streams, name)(*given_to)
        torch.testing.assert_close(found, getattr(reference, name)(*given_to), atol=1e-5, rtol=1e-4)
        after = [x for x in given_to if isinstance(x, torch.Tensor)]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True)), name
