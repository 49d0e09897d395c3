"""Options of the KV connector `lmcache`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pegboard_kv.role import Role


class LMCacheOptions(BaseModel):
    """Where LMCache keeps the blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    remote_url: str = Field(
        description="LMCache's address of the store, such as lm://host:65432 or fs://host:0/folder"
    )
    max_local_cpu_size: float = Field(
        1.0, gt=0, description="size in GiB of the memory in front of the store, for each rank"
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="further settings, as in LMCache's configuration file"
    )
    role: Role = Field(
        "kv_both", description="kv_producer only saves, kv_consumer only loads, kv_both does both"
    )
    prefill_wait_s: float = Field(
        5.0,
        ge=0,
        description=(
            "seconds that a request with do_remote_prefill waits for blocks that another engine "
            "is writing"
        ),
    )
