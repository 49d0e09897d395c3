"""Options of the KV connector `shared_storage`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from pegboard_kv.named_store import NamedStoreOptions


class SharedStorageOptions(NamedStoreOptions):
    """Where the blocks are, and how many."""

    shared_storage_path: Path = Field(
        description="folder of the blocks; it is made if it does not exist"
    )
    max_size_gb: float = Field(
        50.0,
        ge=0,
        description=(
            "size of the folder in GiB above which the least recently used blocks are deleted; 0 "
            "= no limit"
        ),
    )
