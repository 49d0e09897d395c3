"""Compiled latent attention, compared with the contract's definition on every level."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu.latent import NativeLatentAttention
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.plugin import MLA

from pegboard.interfaces.attention import AttentionLayer, AttentionSetup, Latent
from pegboard_testing.contract_attention import Piece, random_steps
from pegboard_testing.contract_invariant_attention import InvariantLatentContract
from pegboard_testing.contract_latent import (
    STORED,
    LatentContract,
    LatentTrial,
    latent_layer,
    latent_layers,
)

pytestmark = pytest.mark.usefixtures("native")


@pytest.mark.sampled(3)
class TestNativeLatentAttention(LatentContract):
    spec = MLA

    def rounding(self, stored: str) -> float:
        rounds = stored == "bfloat16" and library().level.endswith(("avx512_bf16", "amx"))
        return 0.1 if rounds else 0.0

    def backend(self, setup: AttentionSetup) -> NativeLatentAttention:
        return NativeLatentAttention(None, setup)


class TestInvariantLatentAttention(InvariantLatentContract):
    contract = TestNativeLatentAttention()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_up_projections_of_16_bits(dtype: torch.dtype) -> None:
    """They are read as they are, and nothing else is rounded."""
    layer = latent_layer(5, 136, 20, 16, 36)
    assert layer.latent is not None
    matrices = [matrix.to(dtype) for matrix in layer.latent.matrices()]
    contract = TestNativeLatentAttention()
    lengths = [1, 40, 7]
    trial = LatentTrial(contract, replace(layer, latent=Latent(*matrices)), 16, lengths, 3)
    contract.check(trial, [Piece(row, 0, length) for row, length in enumerate(lengths)])


@pytest.mark.sampled(3)
@settings(max_examples=5)
@given(
    latent_layers(LatentContract.heads),
    st.sampled_from(STORED),
    st.integers(16, 40),
    st.lists(st.integers(1, 60), min_size=2, max_size=6),
    st.integers(0, 2**20),
)
def test_rows_after_the_same_blocks(
    layer: AttentionLayer, stored: str, num_shared: int, owned: list[int], seed: int
) -> None:
    """The first row is computed alone. The others find its first blocks, and all last tokens are
    computed together."""
    shared = 16 * num_shared
    contract = TestNativeLatentAttention()
    lengths = [shared + own for own in owned]
    trial = LatentTrial(contract, layer, 16, lengths, seed, stored)
    for row in range(1, len(lengths)):
        trial.tables[row][:num_shared] = trial.tables[0][:num_shared]
        for rows in (trial.rows["latent"], trial.rows["k_rope"], *zip(*trial.kept, strict=True)):
            rows[row][:shared] = rows[0][:shared]
    contract.check(trial, [Piece(0, 0, lengths[0] - 1)])
    for row, length in enumerate(lengths[1:], 1):
        if length > shared + 1:
            contract.check(trial, [Piece(row, shared, length - 1)])
    contract.check(trial, [Piece(row, length - 1, length) for row, length in enumerate(lengths)])


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_slots_that_no_token_has_written_do_not_matter(stored: str) -> None:
    """They may hold what is not a number, from a request that failed."""
    contract = TestNativeLatentAttention()
    lengths = [37, 16, 90]
    trial = LatentTrial(contract, latent_layer(rope=32), 16, lengths, 3, stored)
    for view in trial.views[0].values():
        view.fill_(float("nan"))
    for pieces in random_steps(np.random.default_rng(5), lengths):
        contract.check(trial, pieces)
