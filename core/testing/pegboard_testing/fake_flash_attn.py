"""A stand-in for the library flash-attn (2.6 to 2.8), which cannot be installed without a GPU: its
one function for paged caches, as strict as the library about what it is given.

    calls = install(monkeypatch, backend)
    FlashAttention(None, setup)

Rows are computed one after another with torch. Keys are read a tile at a time, as the library's
kernels do: the keys of a tile that a row does not attend to are read too, and what is after its
last key counts as zero.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

BLOCK_MULTIPLE = 256
"""Of tokens in a block."""
TILE = 64
"""Keys that are read together."""


def check(condition: bool, message: str) -> None:
    """Raise RuntimeError, as TORCH_CHECK does."""
    if not condition:
        raise RuntimeError(message)


def check_given(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    block_table: Tensor,
) -> None:
    """Raise RuntimeError for what the library refuses."""
    check(q.dtype in (torch.float16, torch.bfloat16), "only float16 and bfloat16")
    check(k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    check(starts.dtype == key_starts.dtype == torch.int32, "cu_seqlens must have dtype int32")
    check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    devices = {x.device for x in (q, k, v, starts, key_starts, block_table)}
    check(len(devices) == 1, f"tensors are on several devices: {devices}")
    check(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "last dimension must be contiguous")
    check(starts.is_contiguous() and key_starts.is_contiguous(), "cu_seqlens must be contiguous")
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    _, heads, width = q.shape
    blocks, block_size, kv_heads, _ = k.shape
    check(block_size % BLOCK_MULTIPLE == 0, "block size must be divisible by 256")
    check(len(starts) > 1, "batch size must be positive")
    check(width <= 256, "head dimension at most 256")
    check(width % 8 == 0, "this copies the cache: the head dimension is not a multiple of 8")
    check(heads % kv_heads == 0, "heads of keys must divide heads of queries")
    check(k.shape == v.shape == (blocks, block_size, kv_heads, width), "shape of k or v")
    check(len(starts) == len(key_starts) == len(block_table) + 1, "numbers of rows differ")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """The library's function, with a block table and without dropout, slopes and probabilities.
    Causal: the last query attends to all keys."""
    assert block_table is not None and softmax_scale is not None and causal
    assert dropout_p == 0 and alibi_slopes is None and not return_attn_probs
    assert type(max_seqlen_q) is int and type(max_seqlen_k) is int, "lengths are of the host"
    check_given(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    group = q.shape[1] // k.shape[2]
    if max_seqlen_q == 1 and group > 1 and window_size[0] < 0:
        # the library then groups the heads of a KV head, and takes a query for each row
        check(len(q) == len(cu_seqlens_q) - 1, "shape is invalid for a query in each row")
    out = torch.full_like(q, float("nan"))
    with torch._C.DisableTorchFunction():  # what a kernel reads makes no host wait
        starts = cu_seqlens_q.tolist()
        key_starts = cu_seqlens_k.tolist()
        for row, table in enumerate(block_table):
            tokens = slice(starts[row], starts[row + 1])
            num_keys = key_starts[row + 1] - key_starts[row]
            check(tokens.stop - tokens.start <= max_seqlen_q, "max_seqlen_q leaves tokens out")
            check(num_keys <= max_seqlen_k, "max_seqlen_k leaves keys out")
            rest = (table, num_keys, softmax_scale, window_size[0], softcap)
            out[tokens] = _row(q[tokens].float(), k, v, *rest).to(q.dtype)
    return out


def _row(
    queries: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    num_keys: int,
    scale: float,
    left: int,
    softcap: float,
) -> Tensor:
    """Return the attention of one row's queries [n, H, D]. left: keys of the window before the
    query's own, < 0 = all."""
    if not num_keys or not len(queries):
        return torch.zeros_like(queries)
    positions = torch.arange(num_keys - len(queries), num_keys)
    first = max(0, int(positions[0]) - left) if left >= 0 else 0
    keys = torch.arange(first // TILE * TILE, num_keys)
    blocks = table[keys // k.shape[1]].long()
    group = queries.shape[1] // k.shape[2]
    read = (x[blocks, keys % k.shape[1]].float().repeat_interleave(group, 1) for x in (k, v))
    own_keys, values = read
    scores = torch.einsum("qhd,khd->hqk", queries, own_keys) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = keys > positions[:, None]
    if left >= 0:
        hidden |= keys < positions[:, None] - left
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def install(monkeypatch: pytest.MonkeyPatch, backend: ModuleType) -> list[dict[str, Any]]:
    """Let a plugin's module import the stand-in: in `sys.modules`, transformers would see it too.
    Returns the numbers that each call is given."""
    calls: list[dict[str, Any]] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append({"max_seqlen_q": args[5], "max_seqlen_k": args[6], **kwargs})
        return flash_attn_varlen_func(*args, **kwargs)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = counted  # type: ignore[attr-defined]
    monkeypatch.setattr(backend, "import_module", {module.__name__: module}.__getitem__)
    return calls
