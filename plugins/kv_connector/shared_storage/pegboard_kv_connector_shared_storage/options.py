"""Options of the KV connector `shared_storage`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from pegboard_kv.role import Role


class SharedStorageOptions(BaseModel):
    """Where the blocks are, and how many."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_storage_path: Path = Field(
        description="folder of the blocks; it is made if it does not exist"
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
    max_size_gb: float = Field(
        50.0,
        ge=0,
        description=(
            "size of the folder in GiB above which the least recently used blocks are deleted; 0 "
            "= no limit"
        ),
    )
