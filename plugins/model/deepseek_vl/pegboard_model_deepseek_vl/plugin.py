"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

DEEPSEEK_VL2 = ModelSpec(
    api="1.0",
    implementation="pegboard_model_deepseek_vl.deepseek_vl2:DeepseekVL2",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
DEEPSEEK_VL2_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_deepseek_vl.processor:DeepseekVL2Processor",
    modalities=("image",),
)
DEEPSEEK_OCR = ModelSpec(
    api="1.0",
    implementation="pegboard_model_deepseek_vl.deepseek_ocr:DeepseekOCR",
    flags=DEEPSEEK_VL2.flags,
)
DEEPSEEK_OCR_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_deepseek_vl.ocr_processor:DeepseekOCRProcessor",
    modalities=("image",),
)
