"""Divides the layers into KV groups and the memory of the KV cache into blocks. Runs once, at
start-up.

Layers with the same spec form one *type*. Each type is split into *groups* with the same number of
layers. A block of any group then has the same number of bytes, and one pool of blocks serves all
groups:

    one type    1 group, all layers
    24 window layers, 8 full layers    groups of 8 layers: 3 window groups, 1 full group

Types with smaller slots have more *tokens per block* instead: as many as fit the common number of
bytes, in multiples of the requested block size. A type with one state per request stores one state
in a block. The prefix cache keeps states only where the blocks of all other groups end, so the
distance that was asked for is rounded up to that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from pegboard.config.limits import Limits
from pegboard.engine.kv.special_rules import make_rule
from pegboard.errors import ConfigError, KVCacheTooSmall
from pegboard.interfaces.attention import Encoder, KVCacheSpec, KVGroup, KVPlan, State

MOST_GROUPS = 12
"""More groups than these are made only if there are more types of layers."""


def plan_kv(
    specs: Mapping[int, KVCacheSpec],
    memory_bytes: int,
    limits: Limits,
    *,
    stages: Sequence[Collection[int]] = (),
    num_blocks_override: int | None = None,
    whole_prompts: bool = False,
) -> KVPlan:
    """Group the layers of `specs` (layer index → what it stores) and size the one pool of blocks.

    memory_bytes: of a rank. stages: the layers of each pipeline stage; () = one stage has all of
    them. limits.block_size is rounded up to what the layers' kernels need. num_blocks_override:
    exact number of blocks, including the null block; memory_bytes is then ignored. whole_prompts: a
    request ends with the step that computes it, so no more blocks are needed than the next step
    and those in flight use.
    Raises KVCacheTooSmall if one request of `max_model_len` tokens does not fit. The message gives
    the bytes it needs and the max_model_len that would fit. Raises ConfigError if no layer stores
    anything.
    """
    if not specs:
        raise ConfigError(
            "no layer stores keys and values: this model needs no KV cache, and the engine cannot "
            "run it"
        )
    parts = _split_layers(specs)
    block_size = limits.block_size
    if not any(spec.slot_bytes() for spec in specs.values()):
        group = KVGroup(tuple(specs), next(iter(specs.values())), limits.max_model_len)
        # a block without bytes for each request
        return KVPlan((group,), limits.max_num_seqs + 1, 0, limits.max_model_len)
    # of the stage that stores most
    num_regions = max(
        sum(layer in stage for layer in layers)
        for layers, _ in parts
        for stage in stages or [specs]
    )
    region_bytes = _region_bytes(parts, block_size)
    block_bytes = num_regions * region_bytes
    sizes = [_tokens_per_block(spec, block_size, region_bytes) for _, spec in parts]
    common = math.lcm(
        *(size for size, (_, spec) in zip(sizes, parts, strict=True) if spec.unit == "token")
    )
    groups = tuple(
        _group(layers, spec, size, common)
        for size, (layers, spec) in zip(sizes, parts, strict=True)
    )
    num_blocks = (
        num_blocks_override if num_blocks_override is not None else memory_bytes // block_bytes
    )
    if whole_prompts:
        of_step = sum(
            limits.max_num_batched_tokens // group.block_size + limits.max_num_seqs
            for group in groups
        )
        num_blocks = min(num_blocks, (1 + limits.num_stages) * of_step + 1)
    # one chain of hashes names the blocks of all groups
    hash_block_size = math.gcd(*(group.block_size for group in groups))
    plan = KVPlan(groups, num_blocks, block_bytes, hash_block_size)
    check_fits(plan, limits.max_model_len, limits.chunk_tokens)
    return plan


def fit_kv(
    specs: Mapping[int, KVCacheSpec],
    memory_bytes: int,
    limits: Limits,
    *,
    stages: Sequence[Collection[int]] = (),
    room_bytes: int = 0,
    shorten: bool = False,
    num_blocks_override: int | None = None,
    whole_prompts: bool = False,
) -> tuple[KVPlan, Limits]:
    """Plan as `plan_kv` does. If one request does not fit, more memory is taken, up to
    `room_bytes`. If it still does not fit and `shorten` is set, max_model_len becomes what fits.
    Returns the plan and the limits."""
    make = partial(
        plan_kv,
        specs,
        stages=stages,
        num_blocks_override=num_blocks_override,
        whole_prompts=whole_prompts,
    )
    try:
        return make(memory_bytes, limits), limits
    except KVCacheTooSmall as error:
        memory_bytes = max(memory_bytes, min(room_bytes, error.needed_bytes))
    try:
        return make(memory_bytes, limits), limits
    except KVCacheTooSmall as error:
        if not shorten or not error.fits:
            raise
        limits = replace(limits, max_model_len=error.fits)
    return make(memory_bytes, limits), limits


def capacity(plan: KVPlan) -> str:
    """Say what fits in the KV cache: tokens, if every layer keeps all of them and one request runs,
    or states of requests."""
    if not plan.block_bytes:
        return "none, the model stores no keys and values"
    encoders = [group for group in plan.groups if isinstance(group.spec.retain, Encoder)]
    tokens = [
        group.block_size
        for group in plan.groups
        if group.spec.unit == "token" and group not in encoders
    ]
    states = [group.spec.retain for group in plan.groups if isinstance(group.spec.retain, State)]
    if not states:
        of_encoders = blocks_per_request(
            msgspec.structs.replace(plan, groups=tuple(encoders)), 1, 1
        )
        num_blocks = plan.num_blocks - 1 - of_encoders
        return f"{num_blocks * min(tokens) // len(tokens):,} tokens"
    every = states[0].checkpoint_every
    states_text = (
        f"states, which the prefix cache keeps every {every} tokens"
        if every
        else "states, which the prefix cache does not keep"
    )
    if not tokens:
        return f"{(plan.num_blocks - 1) // len(states):,} {states_text}"
    return (
        f"{max(0, plan.num_blocks - 1 - len(states)) * min(tokens) // len(tokens):,} tokens and "
        f"{states_text}"
    )


def blocks_per_request(plan: KVPlan, num_tokens: int, chunk_tokens: int) -> int:
    """Return the maximum number of blocks that one request of `num_tokens` tokens holds at any
    time, summed over all groups."""
    return sum(
        make_rule(group, plan.hash_block_size).max_blocks(num_tokens, chunk_tokens)
        for group in plan.groups
    )


def check_fits(plan: KVPlan, max_model_len: int, chunk_tokens: int) -> None:
    """Raise KVCacheTooSmall if a request of `max_model_len` tokens cannot run, even alone."""
    needed = blocks_per_request(plan, max_model_len, chunk_tokens) + 1  # the null block
    if needed <= plan.num_blocks:
        return
    fits = _longest_fit(plan, max_model_len, chunk_tokens)
    advice = (
        f"lower max_model_len to at most {fits} (-1 takes the largest that fits), or give"
        if fits
        else "give"
    )
    error = KVCacheTooSmall(
        f"one request of max_model_len={max_model_len} tokens needs {needed * plan.block_bytes} "
        f"bytes of KV cache ({needed} blocks of {plan.block_bytes} bytes), and there are "
        f"{max(plan.num_blocks, 0) * plan.block_bytes} bytes ({max(plan.num_blocks, 0)} blocks); "
        f"{advice} the KV cache more memory: kv_cache_memory_bytes, or a larger "
        "gpu_memory_utilization, which is a share of the memory of any device"
    )
    error.needed_bytes = needed * plan.block_bytes
    error.fits = fits
    raise error


def _longest_fit(plan: KVPlan, max_model_len: int, chunk_tokens: int) -> int:
    """Return the largest max_model_len that fits the plan's blocks, or 0. A binary search works,
    because a longer request never needs fewer blocks."""
    low = 0
    high = max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_per_request(plan, middle, chunk_tokens) + 1 <= plan.num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _split_layers(specs: Mapping[int, KVCacheSpec]) -> list[tuple[tuple[int, ...], KVCacheSpec]]:
    """Return (layers, spec) of every group: layers with equal specs, split into groups of at most n
    layers. Each pipeline stage has nearly the same share of all groups of a type, because their
    layers take turns."""
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer in sorted(specs):
        by_spec.setdefault(specs[layer], []).append(layer)
    n = _layers_per_group([len(layers) for layers in by_spec.values()])
    groups = []
    for spec, layers in by_spec.items():
        count = -(-len(layers) // n)
        groups += [(tuple(layers[first::count]), spec) for first in range(count)]
    return groups


def _layers_per_group(counts: Sequence[int]) -> int:
    """Return the number of layers in the smallest type, so that only the last group of a type is
    padded. If all types have nearly the same size, return the number in the largest, because a few
    padded layers cost less than twice as many groups. A step does some work for each group, so the
    number is larger if there would be too many."""
    if max(counts) <= 1.25 * min(counts):
        return max(counts)
    sizes = range(min(counts), max(counts) + 1)
    return next(n for n in sizes if n == max(counts) or _num_groups(counts, n) <= MOST_GROUPS)


def _num_groups(counts: Sequence[int], size: int) -> int:
    return sum(-(-count // size) for count in counts)


def _region_bytes(parts: Sequence[tuple[tuple[int, ...], KVCacheSpec]], block_size: int) -> int:
    """Return the bytes of one layer's part of a block: the largest of the smallest parts that the
    layers allow, and a multiple of the sizes of all types, so that tensors are aligned."""
    largest = max(
        spec.slot_bytes() * (1 if spec.unit == "request" else _token_step(spec, block_size))
        for _, spec in parts
    )
    return _round_up(
        largest, math.lcm(*(tensor.item_bytes() for _, spec in parts for tensor in spec.tensors))
    )


def _tokens_per_block(spec: KVCacheSpec, block_size: int, region_bytes: int) -> int:
    """Return how many tokens of a layer have room in its part of a block on all ranks, a multiple
    of the requested size."""
    if spec.unit == "request":
        return block_size
    step = _token_step(spec, block_size)
    return spec.ranks * step * (region_bytes // (spec.slot_bytes() * step))


def _group(layers: tuple[int, ...], spec: KVCacheSpec, size: int, common: int) -> KVGroup:
    """Return a group. For states, the tokens per block are those between two states that are kept,
    a multiple of `common`."""
    if isinstance(spec.retain, State) and spec.retain.checkpoint_every:
        size = _round_up(spec.retain.checkpoint_every, common)
        spec = msgspec.structs.replace(
            spec, retain=msgspec.structs.replace(spec.retain, checkpoint_every=size)
        )
    return KVGroup(layers, spec, size)


def _token_step(spec: KVCacheSpec, block_size: int) -> int:
    return _round_up(block_size, spec.block_size_multiple)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
