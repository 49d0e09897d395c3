"""Contract tests of attention backends that declare `encoder`. A plugin's test file:

class TestMyBackend(EncoderContract):
    spec = MY_BACKEND

    def backend(self, setup: AttentionSetup) -> AttentionBackend:
        return MyBackend(None, setup)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pegboard.interfaces.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionSetup,
    AttentionSpec,
)
from pegboard.interfaces.spec import Multiple, unmet
from pegboard_testing.contract_attention import TOLERANCES, Piece, Trial


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    bias: Tensor | None = None,
) -> Tensor:
    """The reference: q [T, H, D], k [T, K, D], v [T, K, Dv] of one prompt → [T, H · Dv]. A token
    attends to all tokens, or to those at most window // 2 away. bias: [H, 2 R + 1], by distance."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).double() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    distances = torch.arange(len(q)) - torch.arange(len(q))[:, None]
    if bias is not None:
        reach = bias.shape[1] // 2
        scores = scores + bias.cpu().double()[:, distances.clamp(-reach, reach) + reach]
    if window is not None:
        scores = scores.masked_fill(distances.abs() > window // 2, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)


class EncoderContract:
    """Override `spec` and `backend`, and `device` if it does not run on the CPU."""

    spec: AttentionSpec
    device = "cpu"

    def backend(self, setup: AttentionSetup) -> AttentionBackend:
        """Return a new backend."""
        raise AssertionError("override EncoderContract.backend")

    def some(self, feature: str, usual: Sequence[Any]) -> list[Any]:
        """Return the usual values that the backend declares, or one that it declares."""
        declared: Any = self.spec.supports.get(feature)
        fitting = [value for value in usual if not unmet(self.spec.supports, {feature: value})]
        return fitting or [declared.of if isinstance(declared, Multiple) else min(declared)]

    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize("seed", range(12))
    def test_whole_prompts_equal_the_reference(self, dtype: str, seed: int) -> None:
        """Layers with a window, a bias by distance, both or neither, as far as they are declared,
        and prompts of any length in one step. A second step takes other prompts."""
        assert not unmet(self.spec.supports, {"encoder": True})
        if unmet(self.spec.supports, {"dtype": dtype}):
            return
        rng = np.random.default_rng(seed)
        kv_heads = int(rng.integers(1, 4))
        head_dim = int(rng.choice(self.some("head_dim", [8, 16, 32, 64])))
        windows = (
            [None, int(rng.choice([2, 7, 16, 128]))]
            if not unmet(self.spec.supports, {"window": True})
            else [None, None]
        )
        reaches: list[int | None] = [None, None]
        if not unmet(self.spec.supports, {"distance_bias": True}):
            reaches = [3 if seed % 3 == 1 else None, 40 if seed % 3 == 2 else None]
        counts = [kv_heads * int(rng.integers(1, 3)) for _ in windows]
        biases = [
            None
            if reach is None
            else torch.from_numpy(rng.normal(size=(count, 2 * reach + 1))).float().to(self.device)
            for count, reach in zip(counts, reaches, strict=True)
        ]
        layers = [
            AttentionLayer(
                layer_index=i,
                num_heads=counts[i],
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5 * (1 + i),
                window=window,
                encoder=True,
                distance_bias=biases[i],
            )
            for i, window in enumerate(windows)
        ]
        lengths = [
            int(rng.choice([1, int(rng.integers(1, 12)), int(rng.integers(1, 300))]))
            for _ in range(6)
        ]
        trial = Trial(self, layers, self.some("block_size", [16, 32])[0], lengths, seed, dtype)
        for rows in ([0, 2, 4], [1, 3, 5, 0]):
            outputs = trial.step([Piece(row, 0, lengths[row]) for row in rows])
            for layer in layers:
                of_layer = (trial.q, trial.k, trial.v)
                parts = [
                    [tensors[layer.layer_index][row].cpu() for tensors in of_layer] for row in rows
                ]
                expected = torch.cat(
                    [
                        bidirectional_attention(
                            q, k, v, layer.scale, layer.window, layer.distance_bias
                        )
                        for q, k, v in parts
                    ]
                )
                allowed = TOLERANCES[dtype]
                actual = outputs[layer.layer_index].double().cpu()
                torch.testing.assert_close(
                    actual,
                    expected,
                    atol=allowed,
                    rtol=allowed,
                    msg=lambda m: f"{layers} {lengths}: {m}",
                )
