"""The attention layer: it rotates, writes to the KV cache and attends, through the chosen backend."""

from __future__ import annotations

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.attention import AttentionLayer
from pegboard.layers.build import Build, Layer
from pegboard.layers.rope import Rope, Rotation


class Attention(Layer):
    """(q [T, H, D], k [T, K, D], v [T, K, Dv], rotation or None) → [T, H·Dv].

    layer_index: names the layer's KV cache. scale: factor of q·k (default D^-0.5). window: in tokens, including the current one.
    rope: if given, q and k are first rotated by the step's rotation.
    """

    def __init__(
        self,
        build: Build,
        layer_index: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        rope: Rope | None = None,
        shares_kv_with: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        super().__init__(build)
        if layer_index in build.declared.attention:
            raise ModelError(f"{build.path}: layer index {layer_index} already has an attention layer")
        self.rope = rope
        self.spec = AttentionLayer(
            layer_index=layer_index,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            soft_cap=soft_cap,
            shares_kv_with=shares_kv_with,
            value_dim=value_dim,
        )
        build.declared.attention[layer_index] = self.spec

    def bind(self) -> None:
        attend = self.build.attention[self.spec.layer_index]
        if self.rope is None:
            self.forward = lambda q, k, v, rotation=None: attend(q, k, v)
            return
        rotate, pairs = self.build.kernels["rope"], self.rope.pairs

        def forward(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
            cos, sin = rotation
            return attend(rotate(q, cos, sin, pairs), rotate(k, cos, sin, pairs), v)

        self.forward = forward
