"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec

GPT_OSS = ModelSpec(
    api="1.0",
    implementation="pegboard_model_gpt_oss.gpt_oss:GptOssModel",
    flags=frozenset({"tensor_parallel"}),
)
