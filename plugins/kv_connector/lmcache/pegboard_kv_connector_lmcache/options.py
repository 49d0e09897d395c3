"""Options of the KV connector `lmcache`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pegboard_kv.named_store import NamedStoreOptions


class LMCacheOptions(NamedStoreOptions):
    """Where LMCache keeps the blocks."""

    remote_url: str = Field(
        description="LMCache's address of the store, such as lm://host:65432 or fs://host:0/folder"
    )
    max_local_cpu_size: float = Field(
        1.0, gt=0, description="size in GiB of the memory in front of the store, for each rank"
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="further settings, as in LMCache's configuration file"
    )
