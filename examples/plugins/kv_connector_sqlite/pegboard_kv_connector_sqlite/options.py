"""Options of the KV connector `sqlite`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class SqliteOptions(BaseModel):
    """Where the blocks are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path = Field(
        default=Path("kv-blocks.sqlite"),
        description="the database, which is made if it is not there",
    )
    max_blocks: int = Field(
        default=100_000, ge=1, description="number of blocks that are kept; older ones are deleted"
    )
