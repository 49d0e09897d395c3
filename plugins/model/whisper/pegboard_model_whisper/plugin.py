"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

WHISPER = ModelSpec(
    api="1.0",
    implementation="pegboard_model_whisper.whisper:Whisper",
    flags=frozenset({"multimodal", "encoder_decoder", "tensor_parallel"}),
)
WHISPER_PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_whisper.processor:WhisperProcessor",
    modalities=("audio",),
    flags=frozenset({"transcription"}),
)
