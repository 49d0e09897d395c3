"""Spec of the tokenizer `hf`."""

from __future__ import annotations

from pegboard.interfaces.tokenizer import TokenizerSpec

HF = TokenizerSpec(
    api="1.0",
    implementation="pegboard_tokenizer_hf.tokenizer:HFTokenizer",
    supports={"payload": {"hf"}},
    reads=("*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken"),
)
