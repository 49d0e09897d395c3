"""What connectors share whose store finds blocks by their names, outside of the engine. It imports
no torch."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, Field

from pegboard_kv.role import Role


class NamedStoreOptions(BaseModel):
    """What the engine does with the store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class NamedStore:
    """The `BlockStore` of such a store. has: (group, hash) → whether the store has the block. It is
    asked each time, because other engines add and delete blocks."""

    def __init__(self, has: Callable[[int, bytes], bool]) -> None:
        self._has = has

    def find(self, group: int, block_hash: bytes) -> int | None:
        return 0 if self._has(group, block_hash) else None

    def use(self, group: int, block_hash: bytes) -> int:
        return 0

    def reserve(self, group: int, block_hash: bytes) -> int | None:
        return None if self._has(group, block_hash) else 0

    def sent(self) -> None:
        """Nothing is kept for a plan."""
