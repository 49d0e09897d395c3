"""Options of the metrics sink `prometheus`."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pegboard.interfaces.metrics import PREFIX


class PrometheusOptions(BaseModel):
    """The names of metrics, and the additional metrics of the process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: str = Field(PREFIX, description="Prefix for the names of metrics that vLLM also has")
    process_metrics: bool = Field(
        True,
        description="Also show what Python and the operating system report about the API process",
    )

    @field_validator("prefix")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", value):
            raise ValueError("expected letters, digits, _ and :, not a digit first")
        return value
