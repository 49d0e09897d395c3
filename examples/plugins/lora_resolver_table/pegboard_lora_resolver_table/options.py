"""Options of the LoRA resolver `table`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class TableOptions(BaseModel):
    """Where the table is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path = Field(
        description=(
            'JSON file such as {"poet": "/adapters/poet-v3"}; relative folders begin at the file'
        )
    )
