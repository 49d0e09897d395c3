"""What Whisper is asked and what its answers mean. Times are compared with transformers' rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_whisper.processor import WhisperProcessor
from pegboard_model_whisper.times import TimesProcessor
from pegboard_model_whisper.times_request import validate
from pegboard_model_whisper.transcriber import WhisperTranscriber
from pegboard_tokenizer_hf.tokenizer import HFTokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
    WhisperTimeStampLogitsProcessor,
)

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup, Segment, Wish
from pegboard.interfaces.tokenizer import Tokenizer as PegboardTokenizer
from pegboard.interfaces.tokenizer import TokenizerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_logits_processor import LogitsProcessorContract
from pegboard_testing.contract_multimodal_processor import TranscriberContract
from pegboard_testing.fake_limits import fake_limits

END, BEGIN, EN, DE, TRANSLATE, TRANSCRIBE, BEFORE, NO_TIMES, FIRST = range(5, 14)
NUM_TIMES = 60
SIZE = FIRST + NUM_TIMES
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
]
TIMES = [f"<|{number / 50:.2f}|>" for number in range(NUM_TIMES)]


def checkpoint_of(folder: Path, special: Any = SPECIAL, **config: Any) -> Checkpoint:
    words = {word: place for place, word in enumerate(["<unk>", "a", "b", "c", "word"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(text, special=True) for text in special])
    inner.add_tokens([AddedToken(text, special=False) for text in TIMES])
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(folder)
    WhisperFeatureExtractor(chunk_length=3).save_pretrained(folder)
    return Checkpoint(
        format="safetensors",
        path=folder,
        config={"vocab_size": SIZE, "max_target_positions": 20, **config},
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("hf", folder),
    )


def tokenizer_of(checkpoint: Checkpoint) -> PegboardTokenizer:
    return HFTokenizer(None, TokenizerSetup(checkpoint, None))


def sound(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)


class TestWhisper(TranscriberContract):
    @pytest.fixture(autouse=True)
    def checkpoint(self, tmp_path: Path) -> None:
        self.given = checkpoint_of(tmp_path)

    def tokenizer(self) -> PegboardTokenizer:
        return tokenizer_of(self.given)

    def processor(self) -> WhisperProcessor:
        return WhisperProcessor(None, MultiModalProcessorSetup(self.given, self.tokenizer()))

    def items(self) -> list[tuple[str, Any]]:
        return [("audio", (sound(count), 16_000)) for count in (1, 500, 48_000)] + [
            ("audio", (sound(8_000), 8_000))
        ]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        return (arrays["input_features"].shape[1] + 1) // 2


class TestTimes(LogitsProcessorContract):
    name = "whisper_times"
    requests = ({}, {"whisper_times": [3, 4, 6]})


@pytest.fixture
def transcriber(tmp_path: Path) -> WhisperTranscriber:
    checkpoint = checkpoint_of(tmp_path)
    return WhisperTranscriber(checkpoint.config, tokenizer_of(checkpoint))


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(), [BEGIN, EN, TRANSCRIBE, NO_TIMES]),
        (Wish(language="de", translates=True), [BEGIN, DE, TRANSLATE, NO_TIMES]),
        (Wish(has_times=True), [BEGIN, EN, TRANSCRIBE]),
        (Wish(text="a b"), [BEFORE, 1, 2, BEGIN, EN, TRANSCRIBE, NO_TIMES]),
        (Wish(text="a " * 30), [BEFORE, *[1] * 9, BEGIN, EN, TRANSCRIBE, NO_TIMES]),
    ],
)
def test_questions(transcriber: WhisperTranscriber, wish: Wish, expected: list[int]) -> None:
    question = transcriber.question(wish)
    assert question.token_ids == expected
    times = {"whisper_times": [END, NO_TIMES, FIRST]} if wish.has_times else {}
    assert question.extra_args == times
    assert validate(SamplingParams(extra_args=dict(question.extra_args))) is None


def test_languages(transcriber: WhisperTranscriber) -> None:
    assert transcriber.languages == {"en": "english", "de": "german"}
    question, codes = transcriber.detection() or pytest.fail("there are two languages")
    assert question.token_ids == [BEGIN] and codes == {EN: "en", DE: "de"}


def test_a_model_of_english(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, vocab_size=51864)
    transcriber = WhisperTranscriber(checkpoint.config, tokenizer_of(checkpoint))
    assert transcriber.languages == {"en": "english"} and transcriber.detection() is None
    assert transcriber.question(Wish(language="en")).token_ids == [BEGIN, NO_TIMES]
    with pytest.raises(RequestError, match="translates nothing"):
        transcriber.question(Wish(translates=True))


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, special=SPECIAL[:-1])
    with pytest.raises(ModelError, match=r"has no token <\|notimestamps\|>"):
        WhisperTranscriber(checkpoint.config, tokenizer_of(checkpoint))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], []),
        ([1, 2], [Segment(0.0, 1.0, 0, [1, 2])]),
        (
            [FIRST, 1, FIRST + 10, FIRST + 20, 2, FIRST + 30, END],
            [(0, 0.2, 1, [1]), (0.4, 0.6, 4, [2])],
        ),
        ([FIRST + 5, 1, 2, FIRST + 20, FIRST + 20, 3], [(0.1, 0.4, 1, [1, 2]), (0.4, 1.0, 5, [3])]),
        ([FIRST, 1, FIRST + 59, END], [Segment(0.0, 1.0, 1, [1])]),
        ([FIRST, END], []),
    ],
)
def test_segments(transcriber: WhisperTranscriber, answer: Any, expected: Any) -> None:
    assert transcriber.segments(answer, 1.0) == [
        Segment(*each) if isinstance(each, tuple) else each for each in expected
    ]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_rules_are_those_of_transformers(data: st.DataObject) -> None:
    """For any tokens before, also those that the rules would have banned."""
    token = st.one_of(st.integers(0, END - 1), st.integers(FIRST, SIZE - 1))
    outputs = data.draw(st.lists(token, max_size=6))
    seed = data.draw(st.integers(0, 1000))
    strength = data.draw(st.sampled_from([1.0, 5.0]))
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(seed)) * strength
    config = GenerationConfig(
        eos_token_id=END, no_timestamps_token_id=NO_TIMES, max_initial_timestamp_index=50
    )
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=1)
    expected = theirs(torch.tensor([[BEGIN, *outputs]]), logits.clone())
    processor = TimesProcessor(
        None, LogitsProcessorSetup(fake_limits(), "cpu", lambda: pytest.fail("not needed"))
    )
    params = SamplingParams(extra_args={"whisper_times": [END, NO_TIMES, FIRST]})
    added = AddedRow(0, params, np.array([BEGIN]), np.array(outputs, np.int32))
    processor.update([added], np.zeros(0, np.int32))
    result = processor.apply(logits.clone(), torch.tensor([0]), torch.tensor([0]), list)
    assert torch.equal(result.isneginf(), expected.isneginf())


@pytest.mark.parametrize("wrong", [1, [1, 2], [3, 2, 1], [1, 2, "3"], [-1, 2, 3], [True, 2, 3]])
def test_wrong_ids(wrong: Any) -> None:
    reason = validate(SimpleNamespace(extra_args={"whisper_times": wrong}))  # type: ignore[arg-type]
    assert reason is not None and "expected the ids of the tokens" in reason
