"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec


def _model(place: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_qwen2_audio.{place}",
        flags=frozenset({"multimodal", "tensor_parallel"}),
    )


def _processor(place: str) -> MultiModalProcessorSpec:
    return MultiModalProcessorSpec(
        api="1.0", implementation=f"pegboard_model_qwen2_audio.{place}", modalities=("audio",)
    )


QWEN2_AUDIO = _model("qwen2_audio:Qwen2Audio")
QWEN2_AUDIO_PROCESSOR = _processor("processor:Qwen2AudioProcessor")
FLAMINGO = _model("qwen2_audio:AudioFlamingo3")
FLAMINGO_PROCESSOR = _processor("processor:AudioFlamingo3Processor")
