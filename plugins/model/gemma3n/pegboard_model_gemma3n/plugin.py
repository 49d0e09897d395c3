"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

GEMMA3N = ModelSpec(
    api="1.0",
    implementation="pegboard_model_gemma3n.gemma3n:Gemma3nModel",
    flags=frozenset({"tensor_parallel"}),
)
MEDIA = ModelSpec(
    api="1.0",
    implementation="pegboard_model_gemma3n.media:Gemma3nMedia",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_gemma3n.processor:Gemma3nProcessor",
    modalities=("image", "audio"),
)
