"""Options of the platform `slice`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pegboard_platform_slice.cpus import numbers


class SliceOptions(BaseModel):
    """Which part of the machine the engine may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: str = Field("", description="CPUs to compute on, like 0-3,8; empty = all")
    memory_gib: float = Field(
        4.0, gt=0, description="what the process may take once the engine starts, in GiB"
    )

    @field_validator("cpus")
    @classmethod
    def _are_numbers(cls, value: str) -> str:
        numbers(value)
        return value
