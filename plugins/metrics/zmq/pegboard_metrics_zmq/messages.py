"""vLLM's messages about KV blocks, as msgpack arrays: [time, [event, …], rank], and an event is
[name, field, …].

Source: https://docs.vllm.ai/en/stable/api/vllm/distributed/kv_events/
"""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.interfaces.metrics import BlocksRemoved, BlocksStored, KVEvent, Sample

KV_CACHE = "GPU"
"""vLLM's name for the engine's own KV cache, on a CPU as well. Routers take other names for slower
memories."""

Hash = bytes | int


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An event. Its first element is the name of the class."""


class BlockStored(_Event):
    """extra_keys: for each block what its hash depends on besides tokens (adapter, cache salt), or
    None."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(_Event):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """ts: seconds since 1970. data_parallel_rank: number of the engine."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def batch_of(sample: Sample, *, int_hashes: bool) -> KVEventBatch:
    """Return the message about a sample's KV events."""
    return KVEventBatch(
        sample.time_s, [_message(event, int_hashes) for event in sample.kv_events], sample.engine
    )


def _message(event: KVEvent, int_hashes: bool) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(event, BlocksStored):
        return BlockStored(
            [_hash(each, int_hashes) for each in event.block_hashes],
            None if event.parent_hash is None else _hash(event.parent_hash, int_hashes),
            list(event.token_ids),
            event.block_size,
            event.lora_id,
            event.medium or KV_CACHE,
            event.lora_name,
            _extra_keys(event),
            event.group,
        )
    if isinstance(event, BlocksRemoved):
        return BlockRemoved(
            [_hash(each, int_hashes) for each in event.block_hashes],
            event.medium or KV_CACHE,
            event.group,
        )
    return AllBlocksCleared()


def _hash(value: bytes, as_int: bool) -> Hash:
    return int.from_bytes(value[-8:], "big") if as_int else value


def _extra_keys(event: BlocksStored) -> list[list[Any] | None] | None:
    if event.lora_name is None and event.cache_salt is None:
        return None
    rest: list[Any] = [] if event.lora_name is None else [event.lora_name]
    first = rest if event.cache_salt is None else [*rest, event.cache_salt]
    return [first, *[rest or None] * (len(event.block_hashes) - 1)]
