"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_granite_speech.granite_speech:GraniteSpeech",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_granite_speech.processor:GraniteSpeechProcessor",
    modalities=("audio",),
)
