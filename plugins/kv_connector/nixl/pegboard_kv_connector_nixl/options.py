"""Options of the KV connector `nixl`."""

from __future__ import annotations

from pydantic import Field

from pegboard_kv.peers.options import PeerOptions


class NixlOptions(PeerOptions):
    """Where this engine serves its blocks, and how the blocks are read."""

    port: int = Field(
        5600,
        ge=1,
        le=65535,
        description="port of the first rank; every further rank and engine has the next",
    )
    backends: tuple[str, ...] = Field(
        ("UCX",),
        min_length=1,
        description="backends of NIXL that may move blocks; both engines need a common one",
    )
