"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec


def _model(place: str, whole: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_gemma_vision.{place}",
        flags=frozenset({"multimodal", "tensor_parallel", whole}),
    )


def _processor(place: str) -> MultiModalProcessorSpec:
    return MultiModalProcessorSpec(
        api="1.0", implementation=f"pegboard_model_gemma_vision.{place}", modalities=("image",)
    )


GEMMA3 = _model("gemma3:Gemma3Vision", "whole_items")
GEMMA3_PROCESSOR = _processor("processor:Gemma3Processor")
PALIGEMMA = _model("paligemma:PaliGemma", "whole_prompt")
PALIGEMMA_PROCESSOR = _processor("processor:PaliGemmaProcessor")
