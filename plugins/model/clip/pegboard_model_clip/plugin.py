"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_clip.clip:Clip",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_clip.processor:ClipProcessor",
    modalities=("image",),
)
SIGLIP = ModelSpec(
    api="1.0",
    implementation="pegboard_model_clip.siglip:Siglip",
    flags=frozenset({"multimodal", "tensor_parallel", "whole_prompt"}),
)
SIGLIP_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_clip.processor:SiglipProcessor",
    modalities=("image",),
)
