"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec

MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_model_molmo.molmo:Molmo",
    flags=frozenset({"multimodal", "tensor_parallel"}),
)
PROCESSOR = MultiModalProcessorSpec(
    api="1.0",
    implementation="pegboard_model_molmo.processor:MolmoProcessor",
    modalities=("image",),
)
