"""Latent attention (MLA) over the paged cache. Decode rows read the latents themselves (absorbed).
Prompts expand the latents to the keys and values of all heads, which takes fewer multiplications if
a latent has many queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.interfaces.attention import AttentionLayer, Full, KVTensor
from pegboard_attention_cpu.plan import Bucket, Chunk, Plan
from pegboard_attention_cpu.sparse import Chooser, Gather, Write

FLOAT8 = torch.float8_e4m3fn
LATENT_TILE = 128
"""Channels of a latent that share a scale in the type fp8_ds_mla."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]


def latent_tensor(layer: AttentionLayer, dtype: str) -> KVTensor:
    """Return what latent attention stores for a token: (c, r) in the type `dtype`. With fp8_ds_mla
    it is vLLM's layout for DeepSeek: C codes of float8_e4m3fn, a float32 scale for each 128 of them
    (their largest magnitude / 448), and r in bfloat16.
    """
    rank = layer.value_dim or 0
    if dtype != "fp8_ds_mla":
        return KVTensor("latent", (layer.head_dim,), dtype)
    return KVTensor(
        "latent", (rank + 4 * -(-rank // LATENT_TILE) + 2 * (layer.head_dim - rank),), "uint8"
    )


def pack(latent: Tensor, rope: Tensor) -> Tensor:
    """Return latents [n, C] and rotated parts [n, R] in the layout fp8_ds_mla (see
    `latent_tensor`): uint8 [n, bytes]."""
    rank = latent.shape[1]
    tiles = functional.pad(latent.float(), (0, -rank % LATENT_TILE)).unflatten(1, (-1, LATENT_TILE))
    largest = torch.finfo(FLOAT8).max
    scales = tiles.abs().amax(-1).div(largest).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (
        (tiles / scales.unsqueeze(-1))
        .clamp(-largest, largest)
        .to(FLOAT8)
        .flatten(1)[:, :rank]
        .contiguous()
    )
    return torch.cat(
        [x.contiguous().view(torch.uint8) for x in (codes, scales, rope.to(torch.bfloat16))], 1
    )


def unpack(stored: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Return packed tokens uint8 [n, bytes] as [n, C + R]."""
    tiles = -(-rank // LATENT_TILE)
    scales = (
        stored[:, rank : rank + 4 * tiles]
        .clone()
        .view(torch.float32)
        .repeat_interleave(LATENT_TILE, 1)[:, :rank]
    )
    rope = stored[:, rank + 4 * tiles :].clone().view(torch.bfloat16)
    return torch.cat(
        [stored[:, :rank].view(FLOAT8).float().mul_(scales).to(dtype), rope.to(dtype)], 1
    )


class LatentLayer:
    """One bound layer: (q [T, H, N], rotated part of q [T, H, R], latent [T, C], rotated part of
    the key [T, R]) → [T, H·V].

    cache: [blocks, block_size, width], of floats, or bytes in the layout fp8_ds_mla. write: see
    `backend.writer`. plan: returns the step's plan. attend: see `backend.attention_of`. gather:
    returns cache[blocks], valid until the next call. chooser: of the keys, if the layer has an
    index; the callable then takes its three tensors too.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        cache: Tensor,
        write: Write,
        plan: Callable[[], Plan],
        attend: Attend,
        gather: Gather,
        chooser: Chooser | None = None,
    ) -> None:
        assert layer.latent is not None and layer.value_dim is not None
        self.up_k, self.up_v = layer.latent.matrices()
        self.rank = layer.value_dim
        self.num_heads = layer.num_heads
        self.cache = cache
        self.write = write
        self.plan = plan
        self.attend = attend
        self.gather = gather
        self.chooser = chooser
        self.is_packed = cache.dtype == torch.uint8

    def __call__(
        self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, *index: Tensor
    ) -> Tensor:
        plan = self.plan()
        if self.chooser is not None:
            self.chooser.store(plan, *index)
        self.store(plan, latent, k_rope)
        out = torch.empty(q.shape[0], self.num_heads * self.up_v.shape[2], dtype=q.dtype)
        for bucket in plan.buckets:
            tokens = slice(bucket.num_rows) if bucket.tokens is None else bucket.tokens
            out[tokens] = self._absorbed(q[tokens], q_rope[tokens], bucket)
        for chunk in plan.chunks:
            tokens = slice(chunk.start, chunk.stop)
            out[tokens] = self._expanded(q[tokens], q_rope[tokens], chunk)
        return out

    def store(self, plan: Plan, latent: Tensor, k_rope: Tensor) -> None:
        """Write the latents [T, C] and rotated parts [T, R] of a step."""
        if plan.stored is not None:
            latent = latent[plan.stored]
            k_rope = k_rope[plan.stored]
        new = (
            pack(latent, k_rope)
            if self.is_packed
            else torch.cat((latent, k_rope), 1).to(self.cache.dtype)
        )
        self.write(plan.slots, new)

    def keys_and_values(
        self, blocks: Tensor, dtype: torch.dtype, unseen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens of these blocks as one head's keys [n, 1, C + R] and values [n, 1,
        C]."""
        keys = self._read(blocks, dtype, unseen).unsqueeze(1)
        return keys, keys[..., : self.rank]

    def _read(self, blocks: Tensor, dtype: torch.dtype, unseen: Tensor | None = None) -> Tensor:
        """Return the tokens of these blocks: [n, C + R]. unseen: see `Scratch.gather`."""
        rows = self.gather(self.cache, blocks, unseen).flatten(0, 1)
        return unpack(rows, self.rank, dtype) if self.is_packed else rows.to(dtype)

    def _absorbed(self, q: Tensor, q_rope: Tensor, bucket: Bucket) -> Tensor:
        """One query for each row. All heads have the same keys, so they are queries of one head."""
        up_k = self.up_k.to(q.dtype)
        up_v = self.up_v.to(q.dtype)
        queries = torch.cat((torch.bmm(q.transpose(0, 1), up_k).transpose(0, 1), q_rope), -1)
        keys = self._read(bucket.blocks, q.dtype, bucket.unseen[Full()]).view(
            bucket.num_rows, 1, bucket.num_keys, -1
        )
        bias = bucket.bias[Full()]
        if self.chooser is not None:
            bias = self.chooser.of_bucket(bucket, bias)
        sums = self.attend(
            queries.unsqueeze(1), keys, keys[..., : self.rank], bias.to(q.dtype), False
        )
        return torch.bmm(sums[:, 0].transpose(0, 1), up_v).transpose(0, 1).flatten(1)

    def _expanded(self, q: Tensor, q_rope: Tensor, chunk: Chunk) -> Tensor:
        """The queries of one row."""
        latent, rope = self._read(chunk.blocks, q.dtype)[: chunk.num_keys].split(
            (self.rank, q_rope.shape[-1]), 1
        )
        up_k = self.up_k.to(q.dtype)
        up_v = self.up_v.to(q.dtype)
        keys = torch.cat((latent @ up_k.transpose(1, 2), rope.expand(self.num_heads, -1, -1)), -1)
        queries = torch.cat((q, q_rope), -1).transpose(0, 1)
        bias = chunk.bias[Full()]
        if self.chooser is not None:
            bias = self.chooser.of_chunk(chunk, bias)
        bias = bias if bias is None else bias.to(q.dtype)
        return (
            self.attend(queries[None], keys[None], (latent @ up_v)[None], bias, bias is None)[0]
            .transpose(0, 1)
            .flatten(1)
        )
