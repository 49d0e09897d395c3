"""The KV cache's memory: one pool of equal-sized blocks, and the layers' named views of it.

All groups have the same number of bytes per block. Layer i of every group lies in region i; a block id therefore means the
same bytes for whichever group holds it. Where all layers of a region store tensors of the same sizes, each tensor has memory of
its own, so that its blocks lie one behind another; otherwise a block holds all tensors of the layer.

    region i   [num_blocks, bytes of layer i's block]  =  layer i of group 0, layer i of group 1, …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pegboard.interfaces.attention import DTYPE_BYTES, KVCacheSpec, KVGroup, KVPlan, KVTensor


def allocate(plan: KVPlan, zeros: Callable[[int], Tensor]) -> dict[int, dict[str, Tensor]]:
    """Views by layer index and tensor name, [num_blocks, block_size, *shape] ([num_blocks, *shape] for per-request states).

    zeros: the platform's memory for the KV cache, of so many bytes. It is zero, because the slots after a request's last token
    are read too, with weight 0, and only finite values survive that.
    """

    def blocks(block_bytes: int) -> Tensor:
        return zeros(plan.num_blocks * block_bytes).view(plan.num_blocks, block_bytes)

    num_regions = max(len(group.layers) for group in plan.groups)
    views: dict[int, dict[str, Tensor]] = {}
    for region in range(num_regions):
        owners = [group for group in plan.groups if region < len(group.layers)]
        layouts = {_layout(group) for group in owners}
        if len(layouts) == 1:
            separate = [blocks(size) for size in layouts.pop()]
            for group in owners:
                pairs = zip(group.spec.tensors, separate, strict=True)
                views[group.layers[region]] = {tensor.name: _view(raw, tensor, group) for tensor, raw in pairs}
        else:
            raw = blocks(plan.block_bytes // num_regions)
            for group in owners:
                views[group.layers[region]] = _packed(raw, group)
    return views


def null_plan(specs: Mapping[int, KVCacheSpec], block_size: int) -> KVPlan:
    """One block that all requests share, to run a step before the size of the KV cache is known."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for index, spec in specs.items():
        layers.setdefault(spec, []).append(index)
    groups = tuple(KVGroup(tuple(indices), spec, block_size) for spec, indices in layers.items())
    regions = max(len(group.layers) for group in groups)
    largest = max(sum(_layout(group)) for group in groups)
    return KVPlan(groups, 1, largest * regions, block_size)


def copy_blocks(views: Mapping[int, Mapping[str, Tensor]], group: KVGroup, source: Tensor, destination: Tensor) -> None:
    """Copy blocks `source[i]` to `destination[i]` (int64 [n]) in all layers of a group."""
    for layer in group.layers:
        for view in views[layer].values():
            view[destination] = view[source]


def _tensor_bytes(tensor: KVTensor, group: KVGroup) -> int:
    count = DTYPE_BYTES[tensor.dtype]
    for extent in tensor.shape:
        count *= extent
    return count * (group.block_size if group.spec.unit == "token" else 1)


def _layout(group: KVGroup) -> tuple[int, ...]:
    """Bytes per block of each tensor."""
    return tuple(_tensor_bytes(tensor, group) for tensor in group.spec.tensors)


def _shape(tensor: KVTensor, group: KVGroup) -> tuple[int, ...]:
    return (group.block_size, *tensor.shape) if group.spec.unit == "token" else tensor.shape


def _view(raw: Tensor, tensor: KVTensor, group: KVGroup) -> Tensor:
    return raw.view(getattr(torch, tensor.dtype)).view(raw.shape[0], *_shape(tensor, group))


def _packed(raw: Tensor, group: KVGroup) -> dict[str, Tensor]:
    """Tensors side by side inside each block."""
    views, offset = {}, 0
    for tensor in group.spec.tensors:
        size = _tensor_bytes(tensor, group)
        part = raw[:, offset : offset + size].view(getattr(torch, tensor.dtype))
        views[tensor.name] = part.unflatten(1, _shape(tensor, group))
        offset += size
    return views
