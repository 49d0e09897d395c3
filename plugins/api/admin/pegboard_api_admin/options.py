"""Options of the apis `admin`, `lora_admin` and `worker_admin`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator


def as_list(value: object) -> object:
    """Return a value as options need it: one path may stand for a list of paths."""
    return (value,) if isinstance(value, str) else value


class AdminOptions(BaseModel):
    """What operators may do with the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile_directory: Path | None = Field(
        None,
        description=(
            "folder that POST /start_profile lets the profiler write to; default: there is no "
            "such route"
        ),
    )


class LoRAOptions(BaseModel):
    """Which folders clients may load adapters from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directories: tuple[Path, ...] | None = Field(
        None,
        description=(
            "folders below which adapters may be loaded; default: any folder that the server can "
            "read, as in vLLM"
        ),
    )

    _one_is_a_list = field_validator("directories", mode="before")(as_list)


class WorkerOptions(BaseModel):
    """Which folders clients may read weights from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directories: tuple[Path, ...] | None = Field(
        None,
        description=(
            "folders below which POST /update_weights may read; default: any folder that the "
            "server can read"
        ),
    )

    _one_is_a_list = field_validator("directories", mode="before")(as_list)
