"""LLaVA with images: the logits of transformers, however the prompts are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pegboard_model_llava.llava import Llava
from tiny_media import (
    IMAGE,
    MediaReference,
    add_adapter,
    check_media,
    check_output,
    open_media_llm,
    prompt,
    some_prompts,
    write_llava,
)
from tiny_models import divide

from pegboard import SamplingParams
from pegboard.data.request import LoRARequest
from pegboard.errors import ConfigError, EngineDeadError
from pegboard_testing.contract_multimodal_processor import random_image


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "whole items": {"max_num_batched_tokens": 20, "disable_chunked_mm_input": True},
    "few rows": {
        "max_num_batched_tokens": 64,
        "max_num_encoder_input_tokens": 5,
        "encoder_cache_size": 20,
    },
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(llava: MediaReference, settings: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(llava, some_prompts(), repeats=2, **settings)


def test_preempted(llava: MediaReference) -> None:
    """There is room for one of the prompts and a half."""
    many = [prompt(number, random_image(20, 20, number), 5) for number in range(4)]
    check_media(llava, many, num_tokens=12, num_gpu_blocks_override=12, max_model_len=40)


def test_several_answers_and_the_order_of_items(llava: MediaReference) -> None:
    first = random_image(30, 20, seed=3)
    second = random_image(20, 30, seed=4)
    prompts = [prompt(first, 7, second, 8), prompt(second, 7, first, 8)]
    params = SamplingParams(
        max_tokens=5, temperature=1.0, top_k=1, n=2, logprobs=-1, ignore_eos=True
    )
    with open_media_llm(llava.directory) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            expected = llava.logprobs(one, answer.token_ids)
            assert list(answer.token_ids) == expected[:-1].argmax(-1).tolist()
    scores = [output.outputs[0].cumulative_logprob for output in outputs]
    assert abs(scores[0] - scores[1]) > 1e-2, "the order of the items matters"


def test_a_chat(llava: MediaReference) -> None:
    image = random_image(30, 20, seed=5)
    content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "w7 w8"}]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(llava.directory) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    one = {**prompt(1, image, 7, 8, 3)}
    check_output(llava, one, output.outputs[0], 1e-4)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_divided(
    llava: MediaReference, monkeypatch: pytest.MonkeyPatch, ranks: int, stages: int
) -> None:
    """Among ranks and pipeline stages, of which the first one makes the rows of images."""
    divide(monkeypatch, ranks, stages)
    check_media(llava, some_prompts())


def test_rows_that_do_not_fit_are_an_error(llava: MediaReference) -> None:
    with open_media_llm(llava.directory) as llm:
        encode = Llava.encode
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(EngineDeadError, match="returned 15 rows for 16 placeholders"),
        ):
            patch.setattr(Llava, "encode", lambda *given: [rows[1:] for rows in encode(*given)])
            llm.generate(some_prompts()[:1], use_tqdm=False)


@pytest.mark.parametrize("root", ["model.language_model", "language_model.model"])
def test_an_adapter_of_the_language_model(tmp_path: Path, root: str) -> None:
    """Adapters may name modules as transformers does, or as checkpoints do."""
    reference = write_llava(tmp_path)
    folder = add_adapter(reference.model, tmp_path, root)
    prompts = some_prompts()
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    adapter = LoRARequest("adapter", 1, str(folder))
    with open_media_llm(tmp_path, max_loras=1, max_lora_rank=8) as llm:
        outputs = llm.generate(prompts, params, lora_request=adapter, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        check_output(reference, one, output.outputs[0], 1e-4)


TEXT_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize("interleaves", [False, True])
def test_a_template_for_text(llava: MediaReference, interleaves: bool) -> None:
    """Images come before the text of their message, or stay where they are."""
    image = {"type": "image_pil", "image_pil": random_image(9, 9)}
    texts = [{"type": "text", "text": word} for word in ("w5", "w6")]
    message = {"role": "user", "content": [texts[0], image, texts[1]]}
    with open_media_llm(llava.directory, interleave_mm_strings=interleaves) as llm:
        (answer,) = llm.chat([message], SamplingParams(max_tokens=1), chat_template=TEXT_ONLY)
    image_ids = [IMAGE] * 16
    expected = [5, *image_ids, 6] if interleaves else [*image_ids, 5, 6]
    assert answer.prompt_token_ids == expected


def test_an_adapter_for_a_modality(tmp_path: Path) -> None:
    """Only prompts with images use it."""
    before = write_llava(tmp_path)
    after = write_llava(tmp_path)
    folder = add_adapter(after.model, tmp_path, "model.language_model")
    prompts = some_prompts()
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    adapters = {"default_mm_loras": {"image": str(folder)}, "max_loras": 1, "max_lora_rank": 8}
    with open_media_llm(tmp_path, **adapters) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        reference = after if "multi_modal_data" in one else before
        check_output(reference, one, output.outputs[0], 1e-4)
    assert {"multi_modal_data" in one for one in prompts} == {True, False}


@pytest.mark.parametrize(
    ("adapters", "more", "told"),
    [
        ({"image": "folder"}, {}, "max_loras"),
        ({"smell": "folder"}, {"max_loras": 1}, "default_mm_loras has 'smell'; expected image"),
    ],
)
def test_wrong_adapters(
    tmp_path: Path, adapters: dict[str, str], more: dict[str, Any], told: str
) -> None:
    write_llava(tmp_path)
    with pytest.raises(ConfigError, match=told):
        open_media_llm(tmp_path, default_mm_loras=adapters, **more)
