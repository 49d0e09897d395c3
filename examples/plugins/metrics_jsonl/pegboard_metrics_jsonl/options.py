"""Options of the metrics sink `jsonl`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class JsonlOptions(BaseModel):
    """Where the lines are written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path = Field(Path("metrics.jsonl"), description="file to append to")
