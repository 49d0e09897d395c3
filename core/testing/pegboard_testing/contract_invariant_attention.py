"""Contract tests of attention backends with the flag "batch_invariant": a token gets the same bits,
whether its row is computed as a whole, in pieces, or alone. A package's test file:

class TestMyInvariantAttention(InvariantAttentionContract):
    contract = TestMyAttention()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from pegboard.interfaces.attention import AttentionLayer, SparseIndex
from pegboard.interfaces.spec import BATCH_INVARIANT, unmet
from pegboard_testing.contract_attention import AttentionContract, Piece, Trial, random_steps
from pegboard_testing.contract_latent import STORED, LatentContract, LatentTrial, latent_layer

PIECE = 23
"""Tokens of a step that computes one row."""


class InvariantTrial(Trial):
    is_invariant = True


class InvariantLatentTrial(LatentTrial):
    is_invariant = True


def ways(lengths: Sequence[int], seed: int) -> Iterator[list[list[Piece]]]:
    """Yield the steps of three ways to compute all rows."""
    yield [[Piece(row, 0, length) for row, length in enumerate(lengths)]]
    yield [
        [Piece(row, start, min(start + PIECE, length))]
        for row, length in enumerate(lengths)
        for start in range(0, length, PIECE)
    ]
    yield list(random_steps(np.random.default_rng(seed), lengths))


def by_token(
    lengths: Sequence[int],
    steps: Iterable[Sequence[Piece]],
    run: Callable[[Sequence[Piece]], Tensor],
) -> list[Tensor]:
    """Run the steps. Return the result [length, …] of each row."""
    parts: list[list[Tensor]] = [[] for _ in lengths]
    for pieces in steps:
        counts = [piece.stop - piece.start for piece in pieces]
        for piece, part in zip(pieces, run(pieces).split(counts), strict=True):
            parts[piece.row].append(part)
    return [torch.cat(part) for part in parts]


class InvariantAttentionContract:
    """contract: of the same backend. lengths: of the rows; backends that are interpreted have
    shorter ones."""

    contract: ClassVar[AttentionContract]
    lengths: ClassVar[Sequence[int]] = (1, 300, 40, 17, 280)

    def test_the_flag_is_declared(self) -> None:
        assert BATCH_INVARIANT in self.contract.spec.flags

    @pytest.mark.parametrize("seed", range(6))
    def test_a_token_has_the_same_bits_in_every_step(self, seed: int) -> None:
        rng = np.random.default_rng(400 + seed)
        layers = self.contract.random_layers(rng)
        block_size = int(rng.choice(self.contract.some("block_size", [16, 32])))
        stored = str(rng.choice(self.contract.some("kv_dtype", ["float32", "bfloat16", "int8"])))
        lengths = self.lengths
        results = []
        for steps in ways(lengths, seed):
            trial = InvariantTrial(
                self.contract, layers, block_size, lengths, seed, "float32", stored
            )

            def run(pieces: Sequence[Piece], trial: Trial = trial) -> Tensor:
                return torch.cat(list(trial.step(pieces).values()), -1)

            results.append(by_token(lengths, steps, run))
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0])), (layers, stored)


class InvariantLatentContract:
    """contract: of the same backend. lengths: see `InvariantAttentionContract`."""

    contract: ClassVar[LatentContract]
    lengths: ClassVar[Sequence[int]] = (1, 150, 40, 280)

    def test_the_flag_is_declared(self) -> None:
        assert BATCH_INVARIANT in self.contract.spec.flags

    @pytest.mark.parametrize("stored", STORED)
    def test_a_token_has_the_same_bits_in_every_step(self, stored: str) -> None:
        self.check(latent_layer(6, 64, 16, 16, 24), stored, self.lengths)

    @pytest.mark.parametrize("stored", STORED)
    def test_a_token_chooses_the_same_keys_in_every_step(self, stored: str) -> None:
        if unmet(self.contract.spec.supports, {"sparse": True}):
            pytest.skip("this backend takes no index")
        lengths = [min(length, PIECE + 9) for length in self.lengths]
        self.check(latent_layer(index=SparseIndex(16, 8, 12)), stored, lengths)

    def check(self, layer: AttentionLayer, stored: str, lengths: Sequence[int]) -> None:
        block_size = self.contract.block_sizes[0]
        results = [
            by_token(
                lengths,
                steps,
                InvariantLatentTrial(self.contract, layer, block_size, lengths, 11, stored).run,
            )
            for steps in ways(lengths, 5)
        ]
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0]))
