"""The backend `cpu_encoder`: the prompts of a step, one after the other, through torch's fused
attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    KVCacheSpec,
    KVView,
)


class EncoderAttention:
    """Attention among the tokens of each prompt. It keeps nothing between steps."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        self._dtype = getattr(torch, setup.dtype)
        self._prompts: list[tuple[int, int]] = []
        self._masks: dict[tuple[int, int | None, int], Tensor] = {}

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        return KVCacheSpec(tensors=())

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        pass

    def plan(self, inputs: AttentionInputs) -> None:
        """Note where prompts begin and end. A step has whole prompts."""
        self._prompts = list(pairwise(inputs.query_start_loc_cpu[: inputs.num_rows + 1].tolist()))
        self._masks = {}

    def _mask(self, length: int, window: int | None, bias: Tensor | None = None) -> Tensor | None:
        """Return what is added to scores, [length, length] or [H, length, length]: −inf for keys
        outside the window, and the bias of the distance. None if that is nothing. Layers with the
        same bias have the same tensor."""
        if window is not None and length <= window // 2 + 1:
            window = None
        if window is None and bias is None:
            return None
        key = length, window, id(bias)
        known = self._masks.get(key)
        if known is None:
            places = torch.arange(length)
            distances = places - places[:, None]
            known = torch.zeros(length, length, dtype=self._dtype)
            if bias is not None:
                reach = bias.shape[1] // 2
                known = bias[:, distances.clamp(-reach, reach) + reach].to(self._dtype)
            if window is not None:
                known = known.masked_fill_(distances.abs() > window // 2, float("-inf"))
            self._masks[key] = known
        return known

    def bind(self, layer: AttentionLayer) -> Callable[..., Tensor]:
        """See `AttentionBackend.bind`."""
        width = layer.num_heads * (layer.value_dim or layer.head_dim)
        scale = layer.scale
        window = layer.window
        bias = layer.distance_bias
        is_shared = layer.num_heads != layer.num_kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = q.new_empty(q.shape[0], width)
            queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            for start, stop in self._prompts:
                result = scaled_dot_product_attention(
                    queries[:, :, start:stop],
                    keys[:, :, start:stop],
                    values[:, :, start:stop],
                    attn_mask=self._mask(stop - start, window, bias),
                    scale=scale,
                    enable_gqa=is_shared,
                )
                out[start:stop] = result[0].transpose(0, 1).reshape(stop - start, width)
            return out

        return attend
