"""Finds and loads the tokenizer file of a checkpoint.

tekken.json             byte-level BPE and special tokens, in one file
tokenizer.model.v3      SentencePiece; the suffix is the version of the instruction format (v7m1:
with images)
"""

from __future__ import annotations

import re
from pathlib import Path

from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from pegboard.errors import ModelError, is_failure

TEKKEN = "tekken.json"
MAX_FILE_BYTES = 128 * 1024 * 1024
VERSIONED = re.compile(r".*\.model\.v([0-9]+)(m[0-9]+)?")


def tokenizer_file(directory: Path) -> Path:
    """Returns the path of tekken.json, or else of the SentencePiece file with the highest version.
    Raises ModelError when there is neither."""
    if (directory / TEKKEN).is_file():
        return directory / TEKKEN
    files = [
        (int(match[1]), path)
        for path in directory.iterdir()
        if (match := VERSIONED.fullmatch(path.name))
    ]
    if not files:
        raise ModelError(
            f"{directory}: there is neither {TEKKEN} nor tokenizer.model.v*, which the tokenizer "
            "'mistral' reads; choose another tokenizer with --tokenizer-mode hf, or copy the "
            "file from the model's repository"
        )
    return max(files)[1]


def load(path: Path) -> MistralTokenizer:
    """Loads the file with mistral-common. Raises ModelError when this fails. Mode `test` accepts
    every conversation that can be written; `serving` would require fields that only Mistral's
    service has."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ModelError(
            f"{path} is larger than {MAX_FILE_BYTES} bytes, more than any tokenizer; fetch the "
            "model again"
        )
    try:
        return MistralTokenizer.from_file(path, mode=ValidationMode.test)
    except ImportError as error:
        raise ModelError(f"{path}: {error}") from error
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ModelError(
            f"{path}: mistral-common cannot read it ({type(error).__name__}: {error}); a newer "
            "version of mistral-common may be able to"
        ) from error
