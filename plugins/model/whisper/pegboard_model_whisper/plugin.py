"""Specs of this package."""

from pegboard.interfaces.logits_processor import LogitsProcessorSpec
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
    flags=frozenset({"transcribes"}),
    logits_processors=("whisper_times",),
)
WHISPER_TIMES = LogitsProcessorSpec(
    api="1.0",
    implementation="pegboard_model_whisper.times:TimesProcessor",
    arguments=("whisper_times",),
    validate="pegboard_model_whisper.times_request:validate",
    flags=frozenset({"host_tokens"}),
)
