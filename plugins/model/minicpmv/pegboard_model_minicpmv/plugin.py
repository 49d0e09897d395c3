"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_minicpmv.minicpmv:MiniCPMV",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_minicpmv.processor:MiniCPMVProcessor",
    modalities=("image", "video"),
)
OMNI_MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_minicpmv.minicpmo:MiniCPMO",
    flags=MODEL.flags,
)
OMNI_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_minicpmv.processor:MiniCPMOProcessor",
    modalities=("image", "video", "audio"),
)
