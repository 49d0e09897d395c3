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
        self._masks: dict[tuple[int, int], Tensor] = {}

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        return KVCacheSpec(tensors=())

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        pass

    def plan(self, inputs: AttentionInputs) -> None:
        """Note where prompts begin and end. A step has whole prompts."""
        self._prompts = list(pairwise(inputs.query_start_loc_cpu[: inputs.num_rows + 1].tolist()))
        self._masks = {}

    def _mask(self, length: int, window: int | None) -> Tensor | None:
        """Return the bias of scores [length, length]: −inf for keys outside the window, or None if
        all are inside."""
        if window is None or length <= window // 2 + 1:
            return None
        known = self._masks.get((length, window))
        if known is None:
            places = torch.arange(length)
            hidden = (places[:, None] - places).abs() > window // 2
            known = torch.zeros(length, length, dtype=self._dtype).masked_fill_(
                hidden, float("-inf")
            )
            self._masks[length, window] = known
        return known

    def bind(self, layer: AttentionLayer) -> Callable[..., Tensor]:
        """See `AttentionBackend.bind`."""
        width = layer.num_heads * (layer.value_dim or layer.head_dim)
        scale = layer.scale
        window = layer.window
        is_shared = layer.num_heads != layer.num_kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = q.new_empty(q.shape[0], width)
            queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            for start, stop in self._prompts:
                result = scaled_dot_product_attention(
                    queries[:, :, start:stop],
                    keys[:, :, start:stop],
                    values[:, :, start:stop],
                    attn_mask=self._mask(stop - start, window),
                    scale=scale,
                    enable_gqa=is_shared,
                )
                out[start:stop] = result[0].transpose(0, 1).reshape(stop - start, width)
            return out

        return attend
