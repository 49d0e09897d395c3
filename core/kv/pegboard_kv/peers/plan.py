"""What the scheduler half sends to the worker half in a step. It imports no torch."""

from __future__ import annotations

import msgspec

from pegboard_kv.peers.connections import Address


class Plan(msgspec.Struct, array_like=True):
    """transfers: an encoded `TransferPlan`. sources: request key → where its blocks are; None =
    they are sent to this engine. targets: (group, block hash, where it is sent to). strangers:
    engines that call a prompt's blocks otherwise, each once."""

    transfers: bytes
    sources: dict[str, Address | None] = {}
    targets: list[tuple[int, bytes, Address]] = []
    strangers: list[Address] = []


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Plan).decode
