"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec


def _model(name: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_qwen_omni.qwen_omni:{name}",
        flags=frozenset({"multimodal", "tensor_parallel"}),
    )


def _processor(name: str) -> MultiModalProcessorSpec:
    return MultiModalProcessorSpec(
        api="1.0",
        implementation=f"pegboard_model_qwen_omni.processor:{name}",
        modalities=("image", "audio", "video"),
    )


QWEN2_5_OMNI = _model("Qwen25Omni")
QWEN2_5_OMNI_PROCESSOR = _processor("Qwen25OmniProcessor")
QWEN3_OMNI = _model("Qwen3Omni")
QWEN3_OMNI_PROCESSOR = _processor("Qwen3OmniProcessor")
