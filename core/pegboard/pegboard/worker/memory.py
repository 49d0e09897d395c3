"""The KV cache's memory: one pool of equal-sized blocks, and the layers' named views of it.

All groups have the same number of bytes per block. Layer i of every group is in region i, so a
block id means the same bytes in every group. If all layers of a region store tensors of the same
sizes, each tensor has separate memory, in which its blocks are contiguous. Otherwise a block holds
all tensors of the layer.

    region i   [num_blocks, bytes of layer i's block]  =  layer i of group 0, layer i of group 1, …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, BlockDelta, NewRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import ConfigError
from pegboard.interfaces.attention import KVCacheSpec, KVGroup, KVPlan, KVTensor
from pegboard.interfaces.platform import MemoryNumbers


def check_room(what: str, needed_bytes: int, there_bytes: int, advice: str) -> None:
    """Raise ConfigError if something needs more memory than there is. The system would kill the
    process later, without a word."""
    if needed_bytes > there_bytes:
        needed, there = (f"{size / 2**30:.2f} GiB" for size in (needed_bytes, there_bytes))
        raise ConfigError(
            f"{what} needs {needed} of memory, and this device has {there} for it; {advice}"
        )


def allocate(
    plan: KVPlan, zeros: Callable[[int], Tensor], total_bytes: int | None = None
) -> dict[int, dict[str, Tensor]]:
    """Return the views by layer index and tensor name: [num_blocks, block_size, *shape], or
    [num_blocks, *shape] for per-request states. zeros: returns the given number of bytes of the
    platform's memory for the KV cache. It must be zero, because the slots after a request's last
    token are also read, with weight 0, and only finite values give 0 then. total_bytes: of the
    device; a plan that needs more is a ConfigError."""
    if total_bytes is not None:
        advice = "lower kv_cache_memory_bytes or num_gpu_blocks_override"
        check_room("the KV cache", plan.num_blocks * plan.block_bytes, total_bytes, advice)

    def blocks(block_bytes: int) -> Tensor:
        return zeros(plan.num_blocks * block_bytes).view(plan.num_blocks, block_bytes)

    if not plan.block_bytes:
        return {index: {} for group in plan.groups for index in group.layers}
    num_regions = max(len(group.layers) for group in plan.groups)
    views: dict[int, dict[str, Tensor]] = {}
    for region in range(num_regions):
        owners = [group for group in plan.groups if region < len(group.layers)]
        layouts = {_layout(group) for group in owners}
        # so that every tensor can be aligned
        largest = -(-max(map(sum, layouts), default=0) // 8) * 8
        separate = [blocks(size) for size in layouts.pop()] if len(layouts) == 1 else []
        shared = torch.empty(0) if separate else blocks(largest)
        for group in owners:
            layout = _layout(group)
            parts = separate or shared[:, : sum(layout)].split(layout, 1)
            views[group.layers[region]] = {
                tensor.name: part.view(getattr(torch, tensor.dtype)).unflatten(
                    1, _shape(tensor, group)
                )
                for tensor, part in zip(group.spec.tensors, parts, strict=True)
            }
    return views


def tensors_of(views: Mapping[int, Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the tensors of all layers."""
    return [tensor for tensors in views.values() for tensor in tensors.values()]


def null_plan(specs: Mapping[int, KVCacheSpec], block_size: int) -> KVPlan:
    """Return a plan with one block that all requests share, to run a step before the size of the KV
    cache is known."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for index, spec in specs.items():
        layers.setdefault(spec, []).append(index)
    groups = tuple(
        KVGroup(tuple(indices), spec, block_size * spec.ranks) for spec, indices in layers.items()
    )
    num_bytes = max((sum(_layout(group)) * len(group.layers) for group in groups), default=0)
    return KVPlan(groups, 1, num_bytes, block_size)


def largest_batch(limits: Limits, num_groups: int) -> Batch:
    """Return the largest possible step, to measure its memory. Every row starts a prompt and
    samples. Together the prompts fill the step. All rows use block 0."""
    num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    counts = np.full(num_rows, limits.max_num_batched_tokens // num_rows, np.int32)
    counts[: limits.max_num_batched_tokens % num_rows] += 1
    counts = np.minimum(counts, limits.max_model_len).tolist()
    return _step([(row, count, 0) for row, count in enumerate(counts)], num_groups)


def random_prompt(specs: Mapping[int, KVCacheSpec], limits: Limits) -> tuple[KVPlan, Batch]:
    """Return a step that computes a prompt of random tokens, the same in every call, and the plan
    of a cache that holds it."""
    plan = null_plan(specs, limits.block_size)
    length = min(512, limits.max_model_len, limits.max_num_batched_tokens)
    count = -(-length // limits.block_size)
    num_groups = len(plan.groups)
    batch = _step([(0, length, 0)], num_groups)
    batch.new[0].token_ids = (
        np.random.default_rng(0).integers(limits.vocab_size, size=length).astype(np.int32)
    )
    batch.new[0].block_ids = tuple(
        np.arange(count * num_groups, dtype=np.int32).reshape(num_groups, count)
    )
    return msgspec.structs.replace(plan, num_blocks=count * num_groups), batch


def trial_steps(limits: Limits, num_groups: int) -> Iterator[Batch]:
    """Yield small steps of every kind: a prompt, a prompt together with a decode, only decodes, and
    the end of the requests. All rows use block 0."""
    length = max(1, min(2, limits.max_model_len - 3, limits.max_num_batched_tokens - 1))
    yield _step([(0, length, 0)], num_groups)
    last = 0
    if limits.max_model_len >= length + 3 and limits.max_num_batched_tokens > length:
        last = min(1, limits.max_num_seqs - 1)
        yield _step([(0, 1, length), (1, length, 0)][: last + 1], num_groups)
        yield _step([(0, 1, length + 1), (1, 1, length)][: last + 1], num_groups)
    yield _step([], num_groups, removed=range(last + 1))


def _step(
    rows: Sequence[tuple[int, int, int]], num_groups: int, removed: Sequence[int] = ()
) -> Batch:
    """Return a step of (row, tokens to compute, computed tokens). A row without computed tokens is
    a new request, all of whose tokens are computed. Every row samples a token."""
    blocks = (np.zeros(1, np.int32),) * num_groups
    numbers, counts, computed = (
        np.array([row[part] for row in rows], np.int32) for part in range(3)
    )
    new = [
        NewRequest(
            row, f"row {row}", np.zeros(count, np.int32), count, 0, SamplingParams(), 0, blocks
        )
        for row, count, start in rows
        if not start
    ]
    return Batch(
        step=0,
        rows=numbers,
        num_scheduled_tokens=counts,
        num_computed_tokens=computed,
        num_draft_tokens=np.zeros_like(numbers),
        samples=np.ones(len(numbers), bool),
        new=new,
        removed_rows=np.array(removed, np.int32),
        new_blocks=BlockDelta.empty(),
        copy_blocks=np.zeros((0, 3), np.int32),
        first_token_ids=np.zeros_like(numbers),
    )


def by_name(numbers: MemoryNumbers) -> dict[str, int]:
    """Return the numbers, in bytes, as they are sent to the engine."""
    return {
        "free": numbers.free_bytes,
        "total": numbers.total_bytes,
        "used": numbers.used_bytes,
        "peak": numbers.peak_bytes,
    }


def copy_blocks(
    views: Mapping[int, Mapping[str, Tensor]], group: KVGroup, source: Tensor, destination: Tensor
) -> None:
    """Copy blocks `source[i]` to `destination[i]` (int64 [n]) in all layers of a group."""
    for layer in group.layers:
        for view in views[layer].values():
            view[destination] = view[source]


def _layout(group: KVGroup) -> tuple[int, ...]:
    """Return the bytes per block of each tensor."""
    return tuple(group.num_slots * tensor.slot_bytes() for tensor in group.spec.tensors)


def _shape(tensor: KVTensor, group: KVGroup) -> tuple[int, ...]:
    return (group.num_slots, *tensor.shape) if group.spec.unit == "token" else tensor.shape
