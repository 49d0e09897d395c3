"""Options of the KV connector `mooncake`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard_kv.peers.options import PeerOptions


class MooncakeOptions(PeerOptions):
    """Where this engine serves its blocks, and how the blocks are read."""

    port: int = Field(
        8998,
        ge=1,
        le=65535,
        description="port of the first rank; every further rank and engine has the next",
    )
    mooncake_protocol: Literal["rdma", "tcp"] = Field(
        "rdma",
        description="rdma needs InfiniBand or RoCE; without a device, Mooncake uses tcp instead",
    )
    device_name: str = Field(
        "", description="names of the devices for rdma, with commas between; all of them if empty"
    )
