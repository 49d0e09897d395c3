"""Options of the LoRA resolver `filesystem`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class FilesystemOptions(BaseModel):
    """Where the adapters are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Path = Field(
        description=(
            "folder whose subfolders are adapters; also VLLM_LORA_RESOLVER_CACHE_DIR; it may be "
            "empty at first"
        )
    )
