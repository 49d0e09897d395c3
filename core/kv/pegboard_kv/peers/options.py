"""Options of connectors whose engines exchange blocks."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from pegboard_kv.role import Role


class PeerOptions(BaseModel):
    """Where this engine serves its blocks, and whom it exchanges them with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(
        "127.0.0.1",
        description="address on which blocks are served, and under which other engines find them",
    )
    port: int = Field(
        14579,
        ge=1,
        le=65535,
        description="port of the first rank; every further rank and engine has the next",
    )
    peers: tuple[str, ...] = Field(
        ("127.0.0.0/8",),
        description=(
            "hosts and networks of the other engines, such as 10.0.0.7 or 10.0.0.0/24; blocks are "
            "exchanged with no others"
        ),
    )
    role: Role = Field(
        "kv_both", description="kv_producer only sends, kv_consumer only loads, kv_both does both"
    )
    size_gb: float = Field(
        4.0,
        gt=0,
        description=(
            "memory in GiB for blocks that other engines may ask for; the oldest make room"
        ),
    )
    timeout_s: float = Field(
        30.0,
        gt=0,
        description="seconds after which blocks that have not come are computed instead",
    )

    @property
    def num_bytes(self) -> int:
        """Size of the memory for blocks."""
        return int(self.size_gb * 2**30)
