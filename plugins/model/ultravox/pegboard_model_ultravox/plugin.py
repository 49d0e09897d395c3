"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_ultravox.ultravox:Ultravox",
    flags=frozenset({"multimodal", "tensor_parallel"}),
    parts="pegboard_model_ultravox.sizes:parts",
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_ultravox.processor:UltravoxProcessor",
    modalities=("audio",),
)
