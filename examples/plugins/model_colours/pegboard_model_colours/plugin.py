"""The specs of the model and of the processor of its images. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_colours.model:Colours",
    flags=frozenset({"multimodal"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_colours.processor:ColoursProcessor",
    modalities=("image",),
)
