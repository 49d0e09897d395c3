"""Options of the KV connector `offload`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from pegboard.interfaces.attention import KVPlan

SIZES = ("size_gb", "cpu_bytes_to_use", "num_cpu_blocks")


class OffloadOptions(BaseModel):
    """How much memory there is, by at most one of the sizes, and which blocks stay in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_gb: float = Field(4.0, gt=0, description="size of the memory in GiB")
    cpu_bytes_to_use: int | None = Field(None, gt=0, description="the same in bytes; vLLM's name")
    num_cpu_blocks: int | None = Field(
        None, gt=0, description="the same as a number of blocks; vLLM's name"
    )
    eviction_policy: Literal["lru", "arc"] = Field(
        "lru",
        description=(
            "which blocks make room: lru = those used least recently; arc = also counts whether "
            "they were used several times"
        ),
    )

    @model_validator(mode="after")
    def _one_size(self) -> OffloadOptions:
        given = [
            name for name in SIZES if getattr(self, name) != type(self).model_fields[name].default
        ]
        if len(given) > 1:
            raise ValueError(f"expected one of {', '.join(SIZES)}, got {' and '.join(given)}")
        return self

    def num_slots(self, plan: KVPlan) -> int:
        """Return how many blocks fit. A block takes as much as in the KV cache."""
        if self.num_cpu_blocks is not None:
            return self.num_cpu_blocks
        return (self.cpu_bytes_to_use or int(self.size_gb * 2**30)) // plan.block_bytes
