"""Specs of the apis `openai`, `transcription`, `tokenize` and `tokenizer_info`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

OPENAI = ApiSpec(
    api="1.0", implementation="pegboard_api_openai.api:OpenAIApi", flags=frozenset({"adapters"})
)
TRANSCRIPTION = ApiSpec(
    api="1.0",
    implementation="pegboard_api_openai.transcription:TranscriptionApi",
    content_types=("multipart/form-data",),
    flags=frozenset({"uploads"}),
)
TOKENIZE = ApiSpec(api="1.0", implementation="pegboard_api_openai.tokenize:TokenizeApi")
TOKENIZER_INFO = ApiSpec(
    api="1.0",
    implementation="pegboard_api_openai.tokenize:TokenizerInfoApi",
    switches={"/tokenizer_info": "--enable-tokenizer-info-endpoint"},
)
