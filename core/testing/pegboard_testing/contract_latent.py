"""Contract tests of latent attention (MLA), for attention backends that declare `latent`. A
plugin's test file:

class TestMyLatentAttention(LatentContract):
    spec = MY_BACKEND

    def backend(self, setup: AttentionSetup) -> AttentionBackend:
        return MyBackend(None, setup)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.interfaces.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionSetup,
    AttentionSpec,
    KVCacheSpec,
    KVGroup,
    KVPlan,
    KVTensor,
    Latent,
    SparseIndex,
)
from pegboard.interfaces.spec import unmet
from pegboard.worker import memory
from pegboard_testing.attention_reference import FLOAT8, nearest
from pegboard_testing.contract_attention import PartTrial, Piece, Trial, random_steps
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.key_parts import Share, joined

STORED = ("float32", "bfloat16", "float16", "fp8_ds_mla")
TOLERANCE = 1e-4


def latent_layer(
    heads: int = 3,
    rank: int = 32,
    nope: int = 8,
    rope: int = 8,
    value: int = 12,
    index: SparseIndex | None = None,
    **more: Any,
) -> AttentionLayer:
    """Return a layer with random up-projections, as core hands it over."""
    random = torch.Generator().manual_seed(heads + rank)
    up_k, up_v = (
        torch.randn(heads, *shape, generator=random) / 4 for shape in ((nope, rank), (rank, value))
    )
    fields = {"layer_index": 0, "scale": (nope + rope) ** -0.5, **more}
    return AttentionLayer(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=rank + rope,
        value_dim=rank,
        latent=Latent(up_k, up_v, index),
        **fields,
    )


def rounded(latent: np.ndarray, rope: np.ndarray, stored: str) -> tuple[np.ndarray, np.ndarray]:
    """Return latents [n, C] and rotated parts [n, R] as a cache of this type gives them back."""
    if stored != "fp8_ds_mla":
        kind = getattr(torch, stored)
        parts = [torch.from_numpy(x).to(kind).float().numpy() for x in (latent, rope)]
        return parts[0], parts[1]
    out = np.empty_like(latent)
    for first in range(0, latent.shape[1], 128):
        tile = latent[:, first : first + 128]
        scale = np.maximum(
            np.abs(tile).max(1, keepdims=True) / np.float32(448), np.float32(2.0**-126)
        ).astype(np.float32)
        out[:, first : first + 128] = (
            nearest(tile / scale, *FLOAT8["float8_e4m3fn"]).astype(np.float32) * scale
        )
    return out, torch.from_numpy(rope).to(torch.bfloat16).float().numpy()


class LatentTrial(Trial):
    """A backend whose new cache contains garbage, and rows of random queries and latents. The
    expected result is computed from expanded keys and values in float64. is_shared: the pool also
    has larger blocks, of another group, so that there are bytes between the latents of two
    blocks."""

    def __init__(
        self,
        contract: LatentContract,
        layer: AttentionLayer,
        block_size: int,
        lengths: Sequence[int],
        seed: int,
        stored: str = "float32",
        is_shared: bool = False,
    ) -> None:
        self.layers = (layer,)
        self.stored = stored
        self.block_size = block_size
        self.lengths = lengths
        self.items = [()] * len(lengths)
        self.device = "cpu"
        random = torch.Generator().manual_seed(seed)
        rank = layer.value_dim or 0
        blocks_of = [-(-length // block_size) for length in lengths]
        self.num_blocks = 1 + sum(blocks_of) + 2
        shuffled = (
            torch.randperm(self.num_blocks - 1, generator=random).add_(1).split([*blocks_of, 2])
        )
        self.tables = [table.to(torch.int32) for table in shuffled[:-1]]
        assert layer.latent is not None
        self.up_k, self.up_v = layer.latent.matrices()
        widths = {
            "q": (layer.num_heads, self.up_k.shape[1]),
            "q_rope": (layer.num_heads, layer.head_dim - rank),
            "latent": (rank,),
            "k_rope": (layer.head_dim - rank,),
        }
        self.rows = {
            name: [torch.randn(n, *shape, generator=random) for n in lengths]
            for name, shape in widths.items()
        }
        if layer.latent.index is not None:
            heads = layer.latent.index.num_heads
            size = layer.latent.index.head_dim
            more = {"vectors": (heads, size), "weights": (heads,), "index": (size,)}
            rows = {
                name: [torch.randn(n, *shape, generator=random) for n in lengths]
                for name, shape in more.items()
            }
            # all types store them exactly
            self.rows |= rows | {"index": [keys.bfloat16().float() for keys in rows["index"]]}
        self.kept = [
            [torch.from_numpy(x).double() for x in rounded(latent.numpy(), rope.numpy(), stored)]
            for latent, rope in zip(self.rows["latent"], self.rows["k_rope"], strict=True)
        ]
        limits = fake_limits(
            max_num_batched_tokens=sum(lengths),
            max_num_seqs=len(lengths),
            max_model_len=max(lengths),
        )
        self.backend = contract.backend(
            AttentionSetup(
                self.layers,
                "float32",
                "cpu",
                limits,
                torch.get_num_threads(),
                batch_invariant=self.is_invariant,
            )
        )
        spec = self.backend.kv_spec(layer, stored)
        block_bytes = spec.slot_bytes() * block_size
        groups = (KVGroup((layer.layer_index,), spec, block_size),)
        if is_shared:
            block_bytes += 8
            other = KVCacheSpec(tensors=(KVTensor("other", (block_bytes,), "uint8"),))
            groups = *groups, KVGroup((layer.layer_index + 1,), other, 1)
        plan = KVPlan(groups, self.num_blocks, block_bytes, block_size)
        self.views = memory.allocate(plan, self._zeros)
        for view in self.views[layer.layer_index].values():
            view.copy_((torch.randn(view.shape, generator=random) * 9).to(view.dtype))
        self.backend.attach(self.views, block_size)
        self.calls = {0: self.backend.bind(layer)}

    def taken(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Return what the layer is called with."""
        return [
            torch.cat([rows[p.row][p.start : p.stop] for p in pieces])
            for rows in self.rows.values()
        ]

    def run(self, pieces: Sequence[Piece], unstored: frozenset[int] = frozenset()) -> Tensor:
        """Run one step through the backend: [T, H · V]."""
        self.backend.plan(self.inputs(pieces, unstored))
        output: Tensor = self.calls[0](*self.taken(pieces))
        return output

    def wanted(self, pieces: Sequence[Piece]) -> Tensor:
        """Return the same from the definition: expand the keys and values of every head."""
        outputs = []
        layer = self.layers[0]
        for piece in pieces:
            latent, rope = (x[: piece.stop] for x in self.kept[piece.row])
            keys = torch.cat(
                (
                    torch.einsum("hnc,tc->htn", self.up_k.double(), latent),
                    rope.expand(layer.num_heads, -1, -1),
                ),
                -1,
            )
            values = torch.einsum("hcv,tc->htv", self.up_v.double(), latent)
            queries = torch.cat(
                [self.rows[name][piece.row][piece.start : piece.stop] for name in ("q", "q_rope")],
                -1,
            ).double()
            scores = torch.einsum("qhd,htd->hqt", queries, keys) * layer.scale
            hidden = torch.arange(piece.stop) > torch.arange(piece.start, piece.stop)[:, None]
            if layer.latent is not None and layer.latent.index is not None:
                hidden = hidden | ~self._chosen(layer.latent.index.top_k, piece, hidden)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqt,htv->qhv", weights, values).flatten(1))
        return torch.cat(outputs).float()

    def _chosen(self, top_k: int, piece: Piece, hidden: Tensor) -> Tensor:
        """Return which keys have the best scores: bool [queries, keys]."""
        vectors, weights = (
            self.rows[name][piece.row][piece.start : piece.stop].double()
            for name in ("vectors", "weights")
        )
        keys = self.rows["index"][piece.row][: piece.stop].double()
        scores = torch.einsum("qhd,td->qht", vectors, keys).clamp(min=0)
        scores = torch.einsum("qh,qht->qt", weights, scores).masked_fill(hidden, float("-inf"))
        rank = scores.argsort(-1, descending=True).argsort(-1)
        return rank < top_k


class PartLatentTrial(PartTrial, LatentTrial):
    """The same of latents."""

    def taken(self, pieces: Sequence[Piece]) -> list[Tensor]:
        q, q_rope, latent, k_rope = super().taken(pieces)
        absorbed = torch.einsum("thn,hnc->thc", q, self.up_k)
        return [torch.cat((absorbed, q_rope), -1), latent, k_rope]


@st.composite
def latent_layers(draw: st.DrawFn, heads: Sequence[int]) -> AttentionLayer:
    sizes = {
        "rank": draw(st.sampled_from([8, 32, 40, 128, 136, 256, 512])),
        "nope": draw(st.sampled_from([8, 20, 64])),
        "rope": draw(st.sampled_from([8, 16, 64])),
        "value": draw(st.sampled_from([4, 16, 36])),
    }
    return latent_layer(draw(st.sampled_from(heads)), **sizes)


class LatentContract:
    """Every backend that declares `latent` passes these. Override `spec` and `backend`, and the
    sizes if others would take too long. heads: of random layers. long_row, random_row: tokens of
    the longest rows."""

    spec: AttentionSpec
    block_sizes: Sequence[int] = (16, 32, 48)
    heads: Sequence[int] = (1, 2, 5, 16, 40, 50)
    long_row = 700
    random_row = 300

    def backend(self, setup: AttentionSetup) -> AttentionBackend:
        """Return a new backend."""
        raise AssertionError("override LatentContract.backend")

    def rounding(self, stored: str) -> float:
        """Return the largest error, in standard deviations of the results, if products with this
        type of the cache round queries and weights."""
        return 0.0

    def check(self, trial: LatentTrial, pieces: Sequence[Piece]) -> None:
        expected = trial.wanted(pieces)
        allowed = self.rounding(trial.stored) * expected.std().item()
        torch.testing.assert_close(
            trial.run(pieces), expected, atol=max(allowed, TOLERANCE), rtol=TOLERANCE
        )

    @settings(max_examples=8, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.sampled_from(STORED), st.data(), st.integers(0, 2**20))
    def test_absorbed_and_expanded_are_the_definition(
        self, stored: str, data: st.DataObject, seed: int
    ) -> None:
        layer = data.draw(latent_layers(self.heads))
        lengths = data.draw(st.lists(st.integers(1, self.random_row), min_size=1, max_size=4))
        block_size = data.draw(st.sampled_from(self.block_sizes))
        is_shared = data.draw(st.booleans())
        trial = LatentTrial(self, layer, block_size, lengths, seed, stored, is_shared)
        for pieces in random_steps(np.random.default_rng(seed), lengths):
            self.check(trial, pieces)

    @pytest.mark.parametrize("stored", STORED)
    def test_ragged_decodes(self, stored: str) -> None:
        """Every row is filled in one step, and decodes with rows of very different lengths."""
        lengths = [2, 17, 33, self.long_row // 3, self.long_row, 16, 1]
        trial = LatentTrial(
            self, latent_layer(6, 128, 16, 16, 24), self.block_sizes[0], lengths, 11, stored
        )
        self.check(
            trial, [Piece(row, 0, length - 1) for row, length in enumerate(lengths) if length > 1]
        )
        self.check(trial, [Piece(row, length - 1, length) for row, length in enumerate(lengths)])

    @pytest.mark.parametrize("stored", STORED)
    def test_parts_of_the_keys_give_the_whole(self, stored: str) -> None:
        """Ranks that share out the tokens. Some have none of a row."""
        if unmet(self.spec.supports, {"part": True}):
            pytest.skip("this backend needs all keys")
        lengths = [1, 3, 40, self.long_row, 20]
        layer = latent_layer(6, 128, 16, 16, 24)
        rest = (self.block_sizes[0], lengths, 12, stored)
        whole = LatentTrial(self, layer, *rest)
        part = replace(layer, is_part=True)
        trials = [PartLatentTrial(Share(rank, 3, 2), self, part, *rest) for rank in range(3)]
        for pieces in random_steps(np.random.default_rng(5), lengths):
            of_ranks: list[Any] = [trial.run(pieces) for trial in trials]
            sums = joined(of_ranks)
            actual = torch.einsum("thc,hcv->thv", sums, whole.up_v).flatten(1)
            expected = whole.wanted(pieces)
            allowed = max(self.rounding(stored) * expected.std().item(), TOLERANCE)
            torch.testing.assert_close(actual, expected, atol=allowed, rtol=TOLERANCE)

    @pytest.mark.parametrize("stored", STORED)
    def test_an_index_chooses_the_keys(self, stored: str) -> None:
        """Prompts in pieces, then decodes, of rows with fewer and more keys than a query attends
        to."""
        if unmet(self.spec.supports, {"sparse": True}):
            pytest.skip("this backend takes no index")
        lengths = [2, 17, 33, 70]
        trial = LatentTrial(
            self,
            latent_layer(index=SparseIndex(16, 8, 12)),
            self.block_sizes[0],
            lengths,
            3,
            stored,
        )
        self.check(trial, [Piece(row, 0, length // 2) for row, length in enumerate(lengths)])
        self.check(
            trial,
            [
                Piece(row, length // 2, length - 1)
                for row, length in enumerate(lengths)
                if length > 2
            ],
        )
        self.check(trial, [Piece(row, length - 1, length) for row, length in enumerate(lengths)])

    def test_only_latents_are_stored_in_the_documented_layout(self) -> None:
        """One unsharded vector per token: DeepSeek's 576 channels, or the 656 bytes of vLLM's
        fp8_ds_mla."""
        layer = latent_layer(4, 512, 16, 64, 16)
        backend = self.backend(AttentionSetup((layer,), "float32", "cpu", fake_limits()))
        sizes = {
            stored: backend.kv_spec(layer, stored).slot_bytes()
            for stored in ("float32", "bfloat16", "fp8_ds_mla")
        }
        assert sizes == {"float32": 2304, "bfloat16": 1152, "fp8_ds_mla": 656}
        trial = LatentTrial(self, layer, self.block_sizes[0], [1], 5, "fp8_ds_mla")
        trial.run([Piece(0, 0, 1)])
        (view,) = trial.views[0].values()
        token = (
            view.flatten(0, -2)
            .view(torch.uint8)
            .view(-1, 656)[int(trial.tables[0][0]) * self.block_sizes[0]]
        )
        scales = token[512:528].clone().view(torch.float32)
        codes = token[:512].clone().view(torch.float8_e4m3fn).float().view(4, 128) * scales[:, None]
        torch.testing.assert_close(scales, trial.rows["latent"][0].view(4, 128).abs().amax(1) / 448)
        torch.testing.assert_close(codes.flatten().double(), trial.kept[0][0][0])
        torch.testing.assert_close(
            token[528:].clone().view(torch.bfloat16).double(), trial.kept[0][1][0]
        )

    def test_tokens_without_a_slot_are_not_stored(self) -> None:
        trial = LatentTrial(self, latent_layer(), self.block_sizes[0], [9, 1, 6], 400)
        pieces = [Piece(1, 0, 1), Piece(0, 0, 9), Piece(2, 0, 6)]
        blocks = trial.tables[0].long()
        (view,) = trial.views[0].values()
        before = view[blocks].clone()
        actual = trial.run(pieces, unstored=frozenset({0}))
        expected = trial.wanted(pieces)
        assert torch.equal(before, view[blocks])
        for tokens in (slice(0, 1), slice(10, 16)):
            torch.testing.assert_close(
                actual[tokens], expected[tokens], atol=TOLERANCE, rtol=TOLERANCE
            )

    def test_types_are_declared(self) -> None:
        assert not any(unmet(self.spec.supports, {"latent": stored}) for stored in STORED)
        assert "float8_e4m3fn" in unmet(self.spec.supports, {"latent": "float8_e4m3fn"})[0]
