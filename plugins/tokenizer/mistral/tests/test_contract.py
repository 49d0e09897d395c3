"""The tokenizer passes the contract of its kind and the generic contract, with both kinds of
file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pegboard_tokenizer_mistral.tokenizer import MistralCommonTokenizer

from pegboard.interfaces.tokenizer import TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_tokenizer import TokenizerContract


def test_contract() -> None:
    check_entry(installed_entry("tokenizer", "mistral"))


class MadeFromFiles(TokenizerContract):
    folder: Path

    def tokenizer(self, chat_template: str | None = None) -> MistralCommonTokenizer:
        payload = TokenizerPayload("hf", self.folder)
        checkpoint = Checkpoint(
            format="x", path=self.folder, config={}, architectures=(), tensors={}, tokenizer=payload
        )
        return MistralCommonTokenizer(None, TokenizerSetup(checkpoint, chat_template))


class TestTekken(MadeFromFiles):
    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, write_tekken: Callable[..., Path]) -> None:
        self.folder = write_tekken(tmp_path).parent


class TestSentencePiece(MadeFromFiles):
    @pytest.fixture(autouse=True)
    def files(self, tmp_path: Path, write_sentencepiece: Callable[..., Path]) -> None:
        self.folder = write_sentencepiece(tmp_path, "v3").parent
