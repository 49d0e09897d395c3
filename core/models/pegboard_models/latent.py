"""Latent attention (MLA, DeepSeek-AI 2024): keys and values of all heads are linear functions of
one small vector per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.attention import AttentionLayer, Latent, SparseIndex
from pegboard.interfaces.quantization import LinearLayer, Part, WeightMethod
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Layer, Rotation
from pegboard.layers.build import Holder
from pegboard.layers.lora import AdapterSlots, Fitted
from pegboard.layers.shards import part_of, scaled


class LatentAttention(Layer):
    """(q [T, H, N + R], latent [T, C], k_rope [T, R], rotation) → [T, H·V]. The last R channels of
    q, and k_rope, are rotated, unless the rotation is None. With an index, it takes the backend's
    extra arguments too.

    The layer holds the checkpoint's module build.path.kv_b_proj [H·(N + V), C], which makes the N
    other channels of every head's keys, and its values. The weight has two uses that need different
    layouts, and backends multiply it head by head. So it is dequantized once and kept in the type
    of weights that are not quantized: it is a small part of a model.

    Each rank has its share of the heads, and all of the latents.

    An adapter of this module changes both matrices, which backends read. So the tokens of each such
    adapter are computed with the adapter in the matrices, after all others.

    layer_index: names the layer's KV cache. rank, nope_dim, rope_dim, value_dim: C, N, R, V. scale:
    factor of q·k. pairs: the rotated channels are neighbors (DeepSeek); otherwise halves
    (MiniCPM3). index: how keys are chosen; None = all.
    """

    def __init__(
        self,
        build: Build,
        layer_index: int,
        num_heads: int,
        *,
        rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        scale: float,
        pairs: bool = True,
        index: SparseIndex | None = None,
    ) -> None:
        super().__init__(build)
        if layer_index in build.declared.attention:
            raise ModelError(
                f"{build.path}: layer index {layer_index} already has an attention layer"
            )
        self.latent = Latent(index=index)
        self.pairs = pairs
        self.whole_heads = num_heads
        self.heads, _ = build.tensor.attention_heads(num_heads, 1)
        self.num_heads = self.heads[1] - self.heads[0]
        self.rank = rank
        self.nope_dim = nope_dim
        self.value_dim = value_dim
        self.layer_index = layer_index
        self.method: WeightMethod | None = None
        self.available: Mapping[str, Any] = {}
        self.adapters: UpSlots | None = None
        build.declared.attention[layer_index] = AttentionLayer(
            layer_index=layer_index,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=rank + rope_dim,
            scale=scale,
            value_dim=rank,
            latent=self.latent,
        )

    def _part(self) -> Part:
        """Return what this rank holds of the weight."""
        each = self.nope_dim + self.value_dim
        shape = (self.whole_heads * each, self.rank)
        name = f"{self.build.path}.kv_b_proj.weight"
        return part_of(name, 0, shape, scaled(self.heads, each))

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        part = self._part()
        path = part.name.removesuffix(".weight")
        layer = LinearLayer(path, self.rank, part.rows[1], (part,))
        self.method = self.build.method("linear", layer)
        self.available = available
        return self.method.declare(available)

    def accept(self, piece: WeightPiece) -> None:
        if self.method is None:
            self.declare(self.available)
        assert self.method is not None
        self.method.accept(piece)

    def finish(self) -> None:
        """Dequantize the weight and split it. A reload writes to the same addresses."""
        assert self.method is not None
        self.method.finish()
        heads = self.method.dequantize().view(self.num_heads, -1, self.rank)
        up_k = heads[:, : self.nope_dim]
        up_v = heads[:, self.nope_dim :].transpose(1, 2)
        if self.latent.up_k is None or self.latent.up_v is None:
            dtype = getattr(torch, self.build.plain_dtype or self.build.dtype)
            options: Any = {"dtype": dtype, "device": self.build.device}
            self.latent.up_k = torch.empty(up_k.shape, **options)
            self.latent.up_v = torch.empty(up_v.shape, **options)
        self.latent.up_k.copy_(up_k)
        self.latent.up_v.copy_(up_v)
        self.method = None

    def holders(self) -> list[Holder]:
        return [self.latent]

    def bind(self) -> None:
        attend = self.build.attention[self.layer_index]
        if self.build.lora is not None:
            self.adapters = self.adapters or UpSlots(self.build, self._part(), self.rank)
            attend = self.adapters.around(attend, self.latent, self.nope_dim)
        rotate = self.build.kernels["rope"]
        nope = self.nope_dim
        pairs = self.pairs

        def forward(
            q: Tensor, latent: Tensor, k_rope: Tensor, rotation: Rotation | None, *index: Tensor
        ) -> Tensor:
            turned = q[..., nope:]
            if rotation is not None:
                cos, sin = rotation
                turned = rotate(turned, cos, sin, pairs)
                k_rope = rotate(k_rope.unsqueeze(1), cos, sin, pairs).squeeze(1)
            out: Tensor = attend(q[..., :nope], turned, latent, k_rope, *index)
            return out

        self.forward = forward


class UpSlots(AdapterSlots):
    """The adapters of an up-projection. part: what this rank holds of it, [H·(N + V), C]. rank: C.
    Steps with such adapters are not replayed: a recording would not change the matrices."""

    def __init__(self, build: Build, part: Part, rank: int) -> None:
        super().__init__(build, (part,), rank, build.lora_rows)
        self.eager = build.declared.eager
        self.changed: set[int] = set()

    def load(self, slot: int, fitted: Fitted) -> None:
        super().load(slot, fitted)
        key = slot, self.modules[0][0]
        if fitted:
            self.changed.add(slot)
            self.eager.add(key)
        else:
            self.changed.discard(slot)
            self.eager.discard(key)

    def around(
        self, attend: Callable[..., Tensor], latent: Latent, nope_dim: int
    ) -> Callable[..., Tensor]:
        """Return attention with the adapters. attend: of the base model. latent: the matrices that
        it reads. All ranks make the same calls, whatever tokens they have."""
        rows_of_step = self.rows

        def call(q: Tensor, *more: Tensor) -> Tensor:
            out = attend(q, *more)
            if not self.changed or (rows := rows_of_step()) is None:
                return out
            out = out.clone()
            starts = rows.starts.tolist()
            for slot in sorted(self.changed):
                at = rows.order[starts[slot] : starts[slot + 1]].long()
                with self._merged(slot, latent, nope_dim):
                    out[at] = attend(q, *more)[at]
            return out

        return call

    @contextmanager
    def _merged(self, slot: int, latent: Latent, nope_dim: int) -> Iterator[None]:
        """Have an adapter in the matrices."""
        matrices = latent.matrices()
        kept = [each.clone() for each in matrices]
        up_k, up_v = matrices
        a = self.a[slot - 1, :, : self.max_rank].float()
        change = (a @ self.b[slot - 1].float()).T.unflatten(0, (len(up_k), -1))
        up_k.copy_(up_k.float() + change[:, :nope_dim])
        up_v.copy_(up_v.float() + change[:, nope_dim:].transpose(1, 2))
        try:
            yield
        finally:
            for each, values in zip(matrices, kept, strict=True):
                each.copy_(values)
