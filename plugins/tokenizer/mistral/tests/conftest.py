"""Tokenizer files of a few hundred tokens, made for tests."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard_testing.contract_tokenizer import TEXTS

SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
)
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = ("hello", " world", " the", "größer", "日本", " weather", "Paris", '{"', '": "', '"}')


AUDIO = {
    "sampling_rate": 16000,
    "frame_rate": 12.5,
    "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
    "chunk_length_s": 30.0,
}
AUDIO_TOKENS = ("[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]")


def tekken(
    folder: Path,
    version: str = "v13",
    words: Sequence[str] = WORDS,
    without: Sequence[str] = (),
    *,
    with_audio: bool = False,
) -> Path:
    """tekken.json: all bytes, and the words with their prefixes (which make merges possible)."""
    tokens = [bytes([value]) for value in range(256)]
    for word in words:
        data = word.encode()
        tokens += [data[:size] for size in range(2, len(data) + 1) if data[:size] not in tokens]
    special = [token for token in SPECIAL if token not in without]
    special += AUDIO_TOKENS if with_audio else ()
    num_special = len(special) + 4  # mistral-common fills in the rest
    content: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + num_special,
            "default_num_special_tokens": num_special,
            "version": version,
        },
        "vocab": [
            {
                "rank": rank,
                "token_bytes": base64.b64encode(data).decode(),
                "token_str": data.decode(errors="ignore") or None,
            }
            for rank, data in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }
    if with_audio:
        content["audio"] = AUDIO
    path = folder / "tekken.json"
    path.write_text(json.dumps(content))
    return path


def sentencepiece(folder: Path, version: str, texts: Sequence[str] = TEXTS) -> Path:
    """tokenizer.model.<version>, trained on the texts; unknown characters are written as bytes."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in texts for _ in range(4) if text.strip()]),
        model_writer=model,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=[token for token in SPECIAL[3:10] if token],
        minloglevel=2,
    )
    path = folder / f"tokenizer.model.{version}"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session")
def write_tekken() -> Callable[..., Path]:
    return tekken


@pytest.fixture(scope="session")
def write_sentencepiece() -> Callable[..., Path]:
    return sentencepiece
