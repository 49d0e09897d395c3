"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec


def _model(name: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_qwen_vl.qwen_vl:{name}",
        flags=frozenset({"multimodal", "tensor_parallel"}),
    )


def _processor(name: str) -> MultiModalProcessorSpec:
    return MultiModalProcessorSpec(
        api="1.0",
        implementation=f"pegboard_model_qwen_vl.processor:{name}",
        modalities=("image", "video"),
    )


QWEN2_VL = _model("Qwen2VL")
QWEN2_5_VL = _model("Qwen25VL")
QWEN3_VL = QWEN3_VL_MOE = _model("Qwen3VL")
QWEN2_VL_PROCESSOR = _processor("QwenVLProcessor")
QWEN2_5_VL_PROCESSOR = _processor("Qwen25VLProcessor")
QWEN3_VL_PROCESSOR = QWEN3_VL_MOE_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_qwen_vl.deep_processor:Qwen3VLProcessor",
    modalities=("image", "video"),
)
