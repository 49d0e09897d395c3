"""The contract of the kind, and an engine whose answers are entities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pegboard_io_processor_entities.processor import EntityProcessor
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedTokenizerFast

from pegboard import LLM
from pegboard.errors import RequestError
from pegboard.interfaces.io_processor import IOProcessor, IOProcessorSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_io_processor import IOProcessorContract, output_of
from pegboard_testing.fake_client import ByteTokenizer

LABELS = ("O", "B-PER", "I-PER", "B-LOC")


def test_contract() -> None:
    check_entry(installed_entry("io_processor", "entities"))


class TestEntities(IOProcessorContract):
    good = ({"text": "Ada"}, {"text": "a", "other": 1})
    wrong = (None, {}, {"text": ""}, {"text": 3})
    width = len(LABELS)

    def processor(self, setup: IOProcessorSetup) -> IOProcessor:
        return EntityProcessor(None, IOProcessorSetup(setup.model, LABELS, setup.tokenizer))

    def processed(self, processor: IOProcessor, data: object) -> object:
        return processor.answer(data, [output_of(np.eye(4)[[1, 0]])])

    @pytest.mark.parametrize(
        ("classes", "expected"),
        [
            ([1, 2, 0, 3], [("PER", "ab"), ("LOC", "d")]),
            ([1, 1, 2, 2], [("PER", "a"), ("PER", "bcd")]),
            ([2, 3, 3, 0], [("PER", "a"), ("LOC", "b"), ("LOC", "c")]),
            ([0, 0, 0, 0], []),
        ],
    )
    def test_tokens_are_joined(self, classes: list[int], expected: list[tuple[str, str]]) -> None:
        output = output_of(np.eye(4)[classes])
        output.prompt_token_ids = list(b"abcd")
        processor = self.processor(IOProcessorSetup("model", LABELS, ByteTokenizer))
        entities = processor.answer({}, [output])
        assert [(each["type"], each["text"]) for each in entities] == expected
        assert all(each["score"] == 1 for each in entities)


def test_an_engine(tmp_path: Path) -> None:
    letters = {letter: place for place, letter in enumerate(["<unk>", *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        id2label=dict(enumerate(LABELS)),
    )
    torch.manual_seed(5)
    model = LlamaForTokenClassification(config).eval()
    with torch.no_grad():
        model.score.weight.mul_(30)
    model.save_pretrained(tmp_path)
    text = "a b c d e f g h i j"
    with LLM(str(tmp_path), dtype="float32", io_processor_plugin="entities") as llm:
        (output,) = llm.encode({"data": {"text": text}}, use_tqdm=False)
        (rows,) = llm.encode(text, pooling_task="token_classify", use_tqdm=False)
        with pytest.raises(RequestError, match="expected"):
            llm.encode({"data": {}})
    num_begun = sum(LABELS[row.argmax()] != "O" for row in rows.outputs.data)
    entities = output.outputs.data
    assert entities and len(entities) <= num_begun
    assert {each["type"] for each in entities} <= {"PER", "LOC"}
    assert all(each["text"] and each["text"] in text for each in entities)
