"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec


def _model(name: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_qwen_vl.qwen_vl:{name}",
        flags=frozenset({"multimodal", "tensor_parallel"}),
    )


QWEN2_VL = _model("Qwen2VL")
QWEN2_5_VL = _model("Qwen25VL")
QWEN2_VL_PROCESSOR = QWEN2_5_VL_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_qwen_vl.processor:QwenVLProcessor",
    modalities=("image",),
)
