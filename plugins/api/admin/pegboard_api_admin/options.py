"""Options of the apis `admin` and `lora_admin`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator


class AdminOptions(BaseModel):
    """What operators may do with the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile_directory: Path | None = Field(
        None, description="folder that POST /start_profile lets the profiler write to; default: there is no such route"
    )


class LoRAOptions(BaseModel):
    """Which folders clients may load adapters from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directories: tuple[Path, ...] | None = Field(
        None, description="folders below which adapters may be loaded; default: any folder that the server can read, as in vLLM"
    )

    @field_validator("directories", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value
