"""A stand-in for the library FlashInfer (0.2 to 0.6), which cannot be used without a GPU: its two
classes for paged caches, as strict as the library about what they are given.

    plans = install(monkeypatch, backend)
    FlashInferAttention(None, setup)

Rows are computed one after another with torch. All keys of the named blocks are read: those that a
query does not attend to have the weight 0, and what is after a row's last key counts as zero.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 2, 3, 4, 8)
"""Heads per KV head that decodes without tensor cores have kernels for."""
FLOATS = (torch.float16, torch.bfloat16)


class PagedPlans:
    """What both classes have in common."""

    plans: list[dict[str, Any]]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD", "only this layout is imitated"
        assert float_workspace_buffer.dtype == torch.uint8, "the workspace is bytes"
        self.device = float_workspace_buffer.device
        self.settings: dict[str, Any] | None = None

    def _plan(
        self,
        starts: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for name, x in (("indptr", indptr), ("last_page_len", last_page_len), ("qo", starts)):
            assert x.dtype == torch.int32, f"{name} must be int32"
            assert x.device.type == "cpu", f"{name} on the device would make plan wait"
        assert indices.dtype == torch.int32, "indices must be int32"
        assert indices.device == self.device, "indices would be copied without pinned memory"
        assert len(starts) == len(indptr) == len(last_page_len) + 1 > 1, "numbers of rows differ"
        assert len(indices) == int(indptr[-1]), "indices"
        assert head_dim in HEAD_DIMS, f"invalid head_dim {head_dim}"
        assert num_qo_heads % num_kv_heads == 0, "heads"
        assert q_data_type in FLOATS and kv_data_type == q_data_type, "types"
        pages = indptr.diff()
        assert bool((pages > 0).all()), "a row without pages"
        assert 1 <= int(last_page_len.min()) <= int(last_page_len.max()) <= page_size, "last page"
        lengths = (pages - 1) * page_size + last_page_len
        assert bool((starts.diff() <= lengths).all()), "more queries than keys"
        self.settings = {
            "starts": starts.tolist(),
            "indptr": indptr.tolist(),
            "indices": indices.clone(),
            "lengths": lengths.tolist(),
            "shape": (num_qo_heads, num_kv_heads, head_dim, page_size),
            "causal": causal,
            "left": window_left,
            "cap": logits_soft_cap or 0.0,
            "scale": head_dim**-0.5 if sm_scale is None else sm_scale,
            "dtype": q_data_type,
            "kind": type(self).__name__,
        }
        self.plans.append(self.settings)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attention of the queries [tokens, heads, head_dim]."""
        plan = self.settings
        assert plan is not None, "plan info is not initialized"
        heads, kv_heads, width, page_size = plan["shape"]
        k, v = paged_kv_cache
        assert q.shape == (plan["starts"][-1], heads, width), "shape of q"
        assert q.is_contiguous(), "q must be contiguous"
        assert q.dtype == k.dtype == v.dtype == plan["dtype"], "types differ from those planned"
        assert k.shape == v.shape == (len(k), page_size, kv_heads, width), "shapes of the cache"
        assert k.stride() == v.stride() and k.stride(-1) == 1, "k/v strides differ"
        assert q.device == k.device == v.device == self.device, "devices differ"
        out = torch.full_like(q, float("nan"))
        with torch._C.DisableTorchFunction():  # what a kernel reads makes no host wait
            for row, length in enumerate(plan["lengths"]):
                tokens = slice(plan["starts"][row], plan["starts"][row + 1])
                blocks = plan["indices"][plan["indptr"][row] : plan["indptr"][row + 1]].long()
                keys, values = (x[blocks].flatten(0, 1)[:length].float() for x in (k, v))
                out[tokens] = _attend(q[tokens].float(), keys, values, plan).to(q.dtype)
        return out


def _attend(queries: Tensor, keys: Tensor, values: Tensor, plan: dict[str, Any]) -> Tensor:
    """Return the attention of one row: [n, heads, head_dim]."""
    group = queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * plan["scale"]
    if plan["cap"] > 0:
        scores = torch.tanh(scores / plan["cap"]) * plan["cap"]
    positions = torch.arange(len(keys) - len(queries), len(keys))[:, None]
    places = torch.arange(len(keys))
    hidden = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    if plan["causal"]:
        hidden |= places > positions
    if plan["left"] >= 0:
        hidden |= places < positions - plan["left"]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


class PrefillPlans(PagedPlans):
    """The library's BatchPrefillWithPagedKVCacheWrapper, for rows with any number of queries."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        **settings: Any,
    ) -> None:
        """Plan a step."""
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(qo_indptr, *pages, *shape, causal=causal, **settings)


class DecodePlans(PagedPlans):
    """The library's BatchDecodeWithPagedKVCacheWrapper, for rows with one query each, which attends
    to all keys."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert not use_cuda_graph, "not imitated"
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **settings: Any,
    ) -> None:
        """Plan a step."""
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in GROUPS, f"Unsupported group_size: {group}"
        starts = torch.arange(len(indptr), dtype=torch.int32)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(starts, indptr, indices, last_page_len, *shape, causal=False, **settings)


def install(monkeypatch: pytest.MonkeyPatch, backend: ModuleType) -> list[dict[str, Any]]:
    """Let a plugin's module import the stand-in: in `sys.modules`, transformers would see it too.
    Returns what is planned, as a list that grows."""
    plans: list[dict[str, Any]] = []
    monkeypatch.setattr(PagedPlans, "plans", plans, raising=False)
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PrefillPlans  # type: ignore[attr-defined]
    module.BatchDecodeWithPagedKVCacheWrapper = DecodePlans  # type: ignore[attr-defined]
    monkeypatch.setattr(backend, "import_module", {module.__name__: module}.__getitem__)
    return plans
