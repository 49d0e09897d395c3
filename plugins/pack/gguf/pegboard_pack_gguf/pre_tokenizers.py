"""How each `tokenizer.ggml.pre` cuts text before byte-level BPE. Standard library only.

The names, and which of them share a cut, follow llama.cpp's table; the patterns are those of the models' own tokenizers.
`patterns` are applied one after the other: each cuts the pieces the one before has left, matches and gaps alike are pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BAILING_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASED_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}" + CASED_END
)
GPT4O_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}" + CASED_END
)
DEEPSEEK3_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
BLOOM_PATTERN = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """ignore_merges: a piece that is a token as it stands is not merged. add_bos: unless the file says otherwise."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


GPT2 = PreTokenizer((GPT2_PATTERN,))
DIGITS_GPT2 = PreTokenizer((r"\p{N}", GPT2_PATTERN))
LLAMA3 = PreTokenizer((LLAMA3_PATTERN,), ignore_merges=True, add_bos=True)
LLAMA3_MERGING = PreTokenizer((LLAMA3_PATTERN,))
QWEN2 = PreTokenizer((QWEN2_PATTERN,))
DEEPSEEK_CODER = PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_HANGUL, r"\p{N}"))
DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK3_PATTERN))
GPT4O = PreTokenizer((GPT4O_PATTERN,))
BLOOM = PreTokenizer((BLOOM_PATTERN,))
BAILING = PreTokenizer((BAILING_PATTERN,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"),
        GPT2,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), DIGITS_GPT2
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), LLAMA3_MERGING),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((LLAMA3_PATTERN,), ignore_merges=True)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), QWEN2
    ),
    "qwen35": PreTokenizer((QWEN35_PATTERN,)),
    "seed-coder": PreTokenizer((SEED_CODER_PATTERN,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    "tekken": PreTokenizer((TEKKEN_PATTERN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), GPT4O),
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK3),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), BLOOM),
    "viking": PreTokenizer((BLOOM_PATTERN, r"\p{N}")),
}
