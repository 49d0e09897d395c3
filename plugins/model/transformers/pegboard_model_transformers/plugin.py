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


def _encoder(place: str, *flags: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_transformers.encoders:{place}",
        tier="reference",
        flags=frozenset({"encoder", "tensor_parallel", *flags}),
    )


ENCODER = _encoder("TransformersEncoder")
CLASSES = _encoder("TransformersClasses", "classifier")
TOKENS = _encoder("TransformersTokenClasses", "classifier", "token_classifier")
