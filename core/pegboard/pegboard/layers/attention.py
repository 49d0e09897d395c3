"""The attention layer: it rotates, writes to the KV cache and attends, through the chosen
backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, as_tensor

from pegboard.errors import ModelError
from pegboard.interfaces.attention import AttentionLayer
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers.build import Build, Layer, PlainTensor
from pegboard.layers.rope import Rope, Rotation


class Attention(Layer):
    """(q [T, H, D], k [T, K, D], v [T, K, Dv], rotation or None) → [T, H·Dv]. k, v: None with
    shares_kv_with.

    layer_index: names the layer's KV cache. scale: factor of q·k (default D^-0.5). window: in
    tokens, including the current one; with `Build.sees_all`, so many to each side, as transformers
    counts. rope: if given, q and k are first rotated by the step's rotation. has_sinks: the
    checkpoint has a tensor `sinks` [H] at build.path. chunk, exact_keys, encoder, encoder_tokens:
    see AttentionLayer; sees_items is that of the build. Each rank has its share of the heads.
    distance_bias: of these heads, see AttentionLayer.
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
        chunk: int | None = None,
        has_sinks: bool = False,
        soft_cap: float | None = None,
        rope: Rope | None = None,
        shares_kv_with: int | None = None,
        value_dim: int | None = None,
        exact_keys: bool = False,
        encoder: bool = False,
        distance_bias: Tensor | None = None,
        encoder_tokens: int | None = None,
    ) -> None:
        super().__init__(build)
        if layer_index in build.declared.attention:
            raise ModelError(
                f"{build.path}: layer index {layer_index} already has an attention layer"
            )
        self.rope = rope
        self.whole_kv_heads = num_kv_heads
        heads, self.kv_heads = build.tensor.attention_heads(num_heads, num_kv_heads)
        held = heads[1] - heads[0]
        name = f"{build.path}.sinks"
        self.sinks = (
            PlainTensor(
                {name: (0, held)},
                (held,),
                build,
                dtype="float32",
                sources={name: (heads,)},
            )
            if has_sinks
            else None
        )
        self.wanted_sinks = [WantedWeight(name, (num_heads,))] if has_sinks else []
        self.spec = AttentionLayer(
            layer_index=layer_index,
            num_heads=held,
            num_kv_heads=self.kv_heads[1] - self.kv_heads[0],
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            window=2 * window if build.sees_all and window is not None else window,
            chunk=chunk,
            sinks=None if self.sinks is None else self.sinks.data,
            soft_cap=soft_cap,
            shares_kv_with=shares_kv_with,
            value_dim=value_dim,
            exact_keys=exact_keys,
            encoder=encoder or build.sees_all,
            distance_bias=distance_bias,
            encoder_tokens=encoder_tokens,
            sees_items=build.sees_items,
        )
        build.declared.attention[layer_index] = self.spec

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        """Find the sinks, and the checkpoint's scales of the KV cache, if the cache has scales. The
        checkpoint's format decides how scales are named."""
        layer = self.build.declared.attention[self.spec.layer_index]
        path = self.build.path
        self.scales: dict[str, list[Tensor]] = {}
        for kind, scale in (("k", layer.k_scale), ("v", layer.v_scale)):
            known = (
                f"{kind}_scale",
                f"{kind}_proj.{kind}_scale",
                f"{kind}_proj.output_scale",
                "kv_scale",
            )
            name = next((name for last in known if (name := f"{path}.{last}") in available), None)
            if scale is not None and name is not None:
                self.scales.setdefault(name, []).append(scale)
        if sum(map(len, self.scales.values())) == 1:
            raise ModelError(
                f"{path}: the checkpoint has {next(iter(self.scales))}, but needs scales for keys "
                "and values"
            )
        return [*(WantedWeight(name) for name in self.scales), *self.wanted_sinks]

    def accept(self, piece: WeightPiece) -> None:
        """Set the sinks, or the scales that this tensor is for. Raises ModelError if it is not a
        number per head, or, for scales, not one positive number or one per KV head."""
        if self.sinks is not None and piece.name in self.sinks.names:
            return self.sinks.accept(piece)
        numbers = as_tensor(piece.data).float().flatten()
        num_heads = self.whole_kv_heads
        if numbers.numel() not in (1, num_heads) or not bool(
            ((numbers > 0) & numbers.isfinite()).all()
        ):
            needed = (
                f"a scale of the KV cache is one positive number, or one for each of {num_heads} "
                "KV heads"
            )
            raise ModelError(
                f"tensor {piece.name} {list(piece.shape)} holds {numbers[:4].tolist()}; {needed}"
            )
        if len(numbers) > 1:
            numbers = numbers[slice(*self.kv_heads)]
        for scale in self.scales[piece.name]:
            scale.copy_(numbers)

    def bind(self) -> None:
        attend = self.build.attention[self.spec.layer_index]
        if self.rope is None:
            self.forward = lambda q, k, v, rotation=None: attend(q, k, v)
            return
        rotate = self.build.kernels["rope"]
        pairs = self.rope.pairs

        def forward(q: Tensor, k: Tensor | None, v: Tensor | None, rotation: Rotation) -> Tensor:
            cos, sin = rotation
            return attend(
                rotate(q, cos, sin, pairs), None if k is None else rotate(k, cos, sin, pairs), v
            )

        self.forward = forward
