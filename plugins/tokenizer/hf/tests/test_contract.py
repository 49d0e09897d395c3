"""The tokenizer passes the contract of its kind and the generic contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pegboard_tokenizer_hf.tokenizer import HFTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pegboard.interfaces.tokenizer import TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_tokenizer import TEXTS, TokenizerContract


def test_contract() -> None:
    check_entry(installed_entry("tokenizer", "hf"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE trained on the texts of the contract."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|tool|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "hello world"] * 2, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    return folder


class TestByteLevel(TokenizerContract):
    @pytest.fixture(autouse=True)
    def files(self, folder: Path) -> None:
        self.folder = folder

    def tokenizer(self, chat_template: str | None = None) -> HFTokenizer:
        payload = TokenizerPayload("hf", self.folder)
        checkpoint = Checkpoint(
            format="x", path=self.folder, config={}, architectures=(), tensors={}, tokenizer=payload
        )
        return HFTokenizer(None, TokenizerSetup(checkpoint, chat_template))
