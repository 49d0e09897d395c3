"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_internvl.internvl:InternVL",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_internvl.processor:InternVLProcessor",
    modalities=("image",),
)
CHAT_MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_internvl.internvl:InternVLChat",
    flags=MODEL.flags,
)
CHAT_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_internvl.processor:InternVLChatProcessor",
    modalities=("image",),
)
