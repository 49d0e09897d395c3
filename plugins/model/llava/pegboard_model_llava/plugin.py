"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec


def _model(place: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_llava.{place}",
        flags=frozenset({"multimodal", "tensor_parallel"}),
    )


def _processor(place: str, *modalities: str) -> MultiModalProcessorSpec:
    return MultiModalProcessorSpec(
        api="1.0",
        implementation=f"pegboard_model_llava.{place}",
        modalities=("image", *modalities),
    )


LLAVA = _model("llava:Llava")
LLAVA_PROCESSOR = _processor("processor:llava_processor")
LLAVA_NEXT = _model("llava:LlavaNext")
LLAVA_NEXT_PROCESSOR = _processor("processor:LlavaNextProcessor")
LLAVA_NEXT_VIDEO = _model("llava:LlavaNextVideo")
LLAVA_NEXT_VIDEO_PROCESSOR = _processor("processor:LlavaNextVideoProcessor", "video")
LLAVA_ONEVISION = _model("llava:LlavaOnevision")
LLAVA_ONEVISION_PROCESSOR = _processor("processor:LlavaOnevisionProcessor", "video")
