"""Options of the quantization method."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class GGUFOptions(BaseModel):
    """compute: "native" multiplies the stored integers where a kernel can; "float" dequantizes
    every weight at load and multiplies in the compute type (takes several times the memory; results
    are as exact as that type)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compute: Literal["native", "float"] = "native"
