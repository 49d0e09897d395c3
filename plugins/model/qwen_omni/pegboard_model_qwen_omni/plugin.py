"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

QWEN2_5_OMNI = ModelSpec(
    api="1.0",
    implementation="pegboard_model_qwen_omni.qwen_omni:Qwen25Omni",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
QWEN2_5_OMNI_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_qwen_omni.processor:Qwen25OmniProcessor",
    modalities=("image", "audio", "video"),
)
