"""Options of the weight loader and of the quantization method."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class GGUFFiles(BaseModel):
    """mmproj: the file of the vision tower: "auto" for the only mmproj*.gguf beside the model,
    "none" to serve the language model alone, or a path, from the folder of the model on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mmproj: str = "auto"


class GGUFOptions(BaseModel):
    """compute: "native" multiplies the stored integers where a kernel can; "float" dequantizes
    every weight at load and multiplies in the compute type (takes several times the memory; results
    are as exact as that type)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compute: Literal["native", "float"] = "native"
