"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_mistral3.mistral3:Mistral3",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_mistral3.processor:Mistral3Processor",
    modalities=("image",),
)
