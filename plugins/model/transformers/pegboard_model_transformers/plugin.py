"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

TRANSFORMERS = ModelSpec(
    api="1.0",
    implementation="pegboard_model_transformers.model:TransformersModel",
    tier="reference",
    flags=frozenset({"tensor_parallel"}),
)
MEDIA = ModelSpec(
    api="1.0",
    implementation="pegboard_model_transformers.media:TransformersMultiModal",
    tier="reference",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_transformers.media_processor:TransformersProcessor",
    modalities=("image",),
)
