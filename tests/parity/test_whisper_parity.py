"""Whisper against transformers, with a tiny random checkpoint: an item is encoded once, and every
token attends to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_media import MediaReference, Prompt, check_media, open_media_llm
from tiny_models import TOLERANCE, divide
from tiny_whisper import RATE, about, sound, write_whisper

from pegboard import LLM, SamplingParams
from pegboard.errors import ConfigError, RequestError

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 16},
    "torch": {"attention_backend": "cpu_paged"},
    "eager": {"enforce_eager": True},
    "drafts": {"spec_method": "ngram", "spec_tokens": 3},
    "int8": {"kv_cache_dtype": "int8", "block_size": 16},
    "one at a time": {"max_num_encoder_input_tokens": 1, "encoder_cache_size": 1},
}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_whisper(tmp_path_factory.mktemp("whisper"))


def some_prompts() -> list[Prompt]:
    return [
        about(sound(1.3, 1), 2, 5),
        about(sound(2.0, 2), *range(8, 40)),
        about(sound(0.1, 3), 7),
        about(sound(1.3, 1), 2, 5, 6, 7),
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(whisper: MediaReference, settings: dict[str, Any]) -> None:
    tolerance = 0.1 if "kv_cache_dtype" in settings else TOLERANCE
    check_media(whisper, some_prompts(), num_tokens=12, tolerance=tolerance, repeats=2, **settings)


def test_preempted(whisper: MediaReference) -> None:
    """There is room for one of the recordings and a half."""
    prompts = [about(sound(1.0, number), number, 5) for number in range(4)]
    check_media(whisper, prompts, num_tokens=30, num_gpu_blocks_override=60, max_model_len=48)


@pytest.mark.parametrize("words", [(7,), (7, 8, 9), range(30)], ids=len)
def test_several_answers(whisper: MediaReference, words: Any) -> None:
    """They share what is stored of the recording."""
    one = about(sound(1.0, 5), *words)
    params = SamplingParams(max_tokens=8, temperature=1.0, top_k=1, n=3, ignore_eos=True)
    with open_media_llm(whisper.directory) as llm:
        (output,) = llm.generate([one], params, use_tqdm=False)
    for answer in output.outputs:
        expected = whisper.logprobs(one, answer.token_ids)
        assert list(answer.token_ids) == expected[:-1].argmax(-1).tolist()


def test_ranks(whisper: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2)
    check_media(whisper, some_prompts())


def test_bfloat16(tmp_path: Path) -> None:
    reference = write_whisper(tmp_path)
    reference.model.to(torch.bfloat16).float()
    reference.model.save_pretrained(tmp_path, dtype=torch.bfloat16)
    with open_media_llm(tmp_path, dtype="auto") as llm:
        one = some_prompts()[0]
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
        (output,) = llm.generate([one], params, use_tqdm=False)
    expected = reference.logprobs(one, [])[-1]
    row = output.outputs[0].logprobs[0]
    values = torch.tensor([row[token].logprob for token in range(len(expected))])
    assert (values - expected).abs().max() < 0.2


def test_prompts_in_two_parts(whisper: MediaReference) -> None:
    """vLLM calls them explicit."""
    audio = sound(1.0, 6)
    encoder = {"prompt": "", "multi_modal_data": {"audio": audio}}
    forms: list[Any] = [
        about(audio, 4, 5),
        {"encoder_prompt": encoder, "decoder_prompt": "w4 w5"},
        {"encoder_prompt": encoder, "decoder_prompt": {"prompt_token_ids": [4, 5]}},
        {"prompt_token_ids": [4, 5], "multi_modal_data": {"audio": [audio]}},
    ]
    params = SamplingParams(max_tokens=6, temperature=0)
    with open_media_llm(whisper.directory) as llm:
        answers = {
            tuple(output.outputs[0].token_ids)
            for output in llm.generate(forms, params, use_tqdm=False)
        }
        assert len(answers) == 1
        for wrong, message in (
            ("w4 w5", "answers about one item of type audio, and the prompt has 0"),
            ({"prompt": "w4", "multi_modal_data": {"audio": [audio, audio]}}, "the prompt has 2"),
            ({"decoder_prompt": "w4"}, "encoder_prompt is missing"),
            ({"encoder_prompt": encoder}, "decoder_prompt is missing"),
            ({"encoder_prompt": {"prompt": "w1"}, "decoder_prompt": "w4"}, "encoders take no text"),
            ({"encoder_prompt": encoder, "decoder_prompt": forms[0]}, "goes into encoder_prompt"),
            ({"encoder_prompt": encoder, "decoder_prompt": "w4", "prompt": "w1"}, "no 'prompt'"),
            (about(sound(2.1, 1), 4), "has 2.1 s, and Whisper hears 2 s at a time"),
            ({**about(audio, 4), "mm_processor_kwargs": {"a": 1}}, "Whisper takes none"),
            ({"prompt": "w4", "multi_modal_data": {"image": audio}}, "takes text, audio only"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate([wrong], params, use_tqdm=False)


def test_audio_of_another_rate(whisper: MediaReference) -> None:
    samples, _ = sound(1.0, 7)
    with open_media_llm(whisper.directory) as llm:
        prompts = [about((samples, rate), 4) for rate in (RATE, RATE * 2)]
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
        one, two = llm.generate(prompts, params, use_tqdm=False)
    assert one.outputs[0].logprobs != two.outputs[0].logprobs


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("enable_prefix_caching", True),
        ("pipeline_parallel_size", 2),
        ("enable_lora", True),
        ("skip_tokenizer_init", True),
        ("kv_connectors", ["offload"]),
    ],
)
def test_what_it_cannot_do(whisper: MediaReference, setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="is not possible with WhisperForConditionalGeneration"):
        LLM(str(whisper.directory), **{setting: value})
