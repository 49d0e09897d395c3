"""Architectures that the format has and that cannot be served, with the reason."""

from __future__ import annotations

_NAMES = {
    "it has layers of experts whose names in GGUF files are not known yet": (
        "arctic dbrx exaone-moe glm-dsa grok grovemoe llada-moe mimo2 mistral4 smallthinker step35"
    ),
    "it has recurrent layers of a kind that is not read from GGUF files yet": (
        "arwkv7 kimi-linear plamo2 qwen35 qwen35moe rwkv6 rwkv6qwen2 rwkv7"
    ),
    "it is not a model that generates text one token after the other": (
        "bert dream eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llada llama-embed "
        "modern-bert neo-bert nomic-bert nomic-bert-moe rnd1 t5 t5encoder wavtokenizer-dec"
    ),
    "it reads images or sound, or is the part of a model that does": (
        "chameleon clip cogvlm deepseek2-ocr hunyuan_vl paddleocr qwen3vl qwen3vlmoe"
    ),
    (
        "its attention adds a bias by distance (ALiBi), and such models are not read from GGUF "
        "files yet"
    ): ("baichuan jais refact"),
    "it is not read from GGUF files yet": (
        "codeshell deci gemma3n gemma4 gptj maincoder minicpm3 openelm plamo plamo3 plm qwen"
    ),
}
UNSERVED = {name: reason for reason, names in _NAMES.items() for name in names.split()}
"""The reason by name of the architecture."""
