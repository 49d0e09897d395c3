"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_glm4v.glm4v:Glm4v",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_glm4v.processor:Glm4vProcessor",
    modalities=("image", "video"),
)
MODEL_9B = ModelSpec(
    api="1.0",
    implementation="pegboard_model_glm4v.glm4v_9b:Glm4v9b",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR_9B = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_glm4v.square_processor:SquareProcessor",
    modalities=("image",),
)
