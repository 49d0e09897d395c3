"""Spec of the tokenizer `mistral`."""

from __future__ import annotations

from pegboard.interfaces.tokenizer import TokenizerSpec

MISTRAL = TokenizerSpec(
    api="1.0",
    implementation="pegboard_tokenizer_mistral.tokenizer:MistralCommonTokenizer",
    supports={"payload": {"hf"}},
    file_patterns=("tekken.json", "tokenizer.model.v*"),
    reads=("*.json", "*.model", "*.model.v*"),
)
