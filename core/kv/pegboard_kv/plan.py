"""What the scheduler half of a connector sends to its worker half in a step. It imports no
torch."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, array_like=True, frozen=True):
    """A block in the KV memory and in the store. group: index of its KV group. block_id: where it
    is in the KV memory. slot: where it is in the store, if the store numbers its places.
    block_hash: its name. first_token: its first token in the request."""

    group: int
    block_id: int
    slot: int
    block_hash: bytes
    first_token: int


class TransferPlan(msgspec.Struct, array_like=True):
    """loads: request key → the blocks to load. saves: the blocks to save. released: keys of
    requests whose blocks are pinned until the worker half has read them. is_idle: the step computes
    nothing, so the worker half may wait for its transfers."""

    loads: dict[str, list[Place]] = {}
    saves: list[Place] = []
    released: list[str] = []
    is_idle: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(TransferPlan)
_NOTHING = _ENCODER.encode(TransferPlan())


def encode(plan: TransferPlan) -> bytes:
    """Return the plan as bytes."""
    return (
        _ENCODER.encode(plan)
        if plan.loads or plan.saves or plan.released or plan.is_idle
        else _NOTHING
    )


def decode(data: bytes) -> TransferPlan:
    """Return the plan that `encode` was given. No bytes are a plan without transfers."""
    return _DECODER.decode(data) if data else TransferPlan()
