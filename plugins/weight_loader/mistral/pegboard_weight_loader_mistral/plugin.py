"""The spec of this package."""

from __future__ import annotations

from pegboard.interfaces.weight_loader import WeightLoaderSpec

MISTRAL = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_weight_loader_mistral.loader:MistralLoader",
    file_patterns=("consolidated*.safetensors",),
    tier="reference",  # a folder may have the model in Hugging Face layout too
)
