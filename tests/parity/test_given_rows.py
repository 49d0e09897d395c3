"""Rows of images that come with a prompt, in place of the images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_aria_parity
import test_audio_parity
import test_deepseek_ocr_parity
import test_deepseek_vl2_parity
import test_fuyu_parity
import test_phi4mm_parity
import test_tiles_parity
import test_video_parity
import torch
from tiny_media import (
    MediaReference,
    Prompt,
    check_output,
    open_media_llm,
    prompt,
    rows_of,
    write_llava,
)

from pegboard import SamplingParams
from pegboard.errors import RequestError
from pegboard.worker.given_rows import GivenRows
from pegboard_testing.contract_multimodal_processor import random_image

WIDE = random_image(40, 20, seed=1)
TALL = random_image(13, 50, seed=2)
ON = {"enable_mm_embeds": True}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


def with_rows(one: Prompt, name: str, rows: Any) -> Prompt:
    return {**one, "multi_modal_data": {name: rows}}


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 256, "block_size": 16}, {"enable_prefix_caching": False}],
)
def test_logits(llava: MediaReference, settings: dict[str, Any]) -> None:
    """In each form, beside images, and twice, so that prefixes come from the cache."""
    one = prompt(5, WIDE, 6, 7)
    two = prompt(8, TALL, WIDE, 9)
    wide, tall = (rows_of(llava, image) for image in (WIDE, TALL))
    both = torch.cat([tall, wide])
    given = [
        (one, with_rows(one, "image", wide)),
        (one, with_rows(one, "image_embeds", [wide[0]])),
        (two, with_rows(two, "image_embeds", both.numpy())),
        (two, with_rows(two, "image_embeds", [*both])),
        (two, two),
    ]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(llava.directory, **ON, **settings) as llm:
        for _ in range(2):
            answers = llm.generate([each for _, each in given], params, use_tqdm=False)
            for (image_prompt, _), answer in zip(given, answers, strict=True):
                check_output(llava, image_prompt, answer.outputs[0], 1e-4)


def test_other_rows_are_not_the_same_prefix(llava: MediaReference) -> None:
    """The same ones are."""
    one = prompt(5, WIDE, 6, 7)
    wide, tall = (rows_of(llava, image) for image in (WIDE, TALL))
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(llava.directory, **ON, block_size=4) as llm:
        llm.generate([with_rows(one, "image", wide)], params, use_tqdm=False)
        (again,) = llm.generate([with_rows(one, "image", wide)], params, use_tqdm=False)
        (answer,) = llm.generate([with_rows(one, "image", tall)], params, use_tqdm=False)
    assert (again.num_cached_tokens, answer.num_cached_tokens) == (16, 0)
    check_output(llava, prompt(5, TALL, 6, 7), answer.outputs[0], 1e-4)


def write_audio(folder: Path) -> str:
    test_audio_parity.write("qwen2_audio", folder)
    return test_audio_parity.MARKS["qwen2_audio"]


def write_internvl(folder: Path) -> str:
    return test_tiles_parity.write("internvl", folder)[1]


def write_aria(folder: Path) -> str:
    test_aria_parity.write(folder)
    return test_aria_parity.MARK


def write_deepseek_vl2(folder: Path) -> str:
    test_deepseek_vl2_parity.write(folder)
    return test_deepseek_vl2_parity.MARK


def write_deepseek_ocr(folder: Path) -> str:
    test_deepseek_ocr_parity.write(folder)
    return test_deepseek_ocr_parity.MARK


def write_phi4mm(folder: Path) -> str:
    test_phi4mm_parity.write(folder)
    return test_phi4mm_parity.MARKS[0]


def write_llava_next(folder: Path) -> str:
    test_video_parity.write_llava(folder, kind="llava_next_video")
    return "<image>"


SOUND = np.random.default_rng(3).standard_normal(8000).astype(np.float32), 16_000


@pytest.mark.sampled(2)
@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("write", "modality", "item"),
    [
        (write_audio, "audio", SOUND),
        (write_internvl, "image", WIDE),
        (write_aria, "image", WIDE),
        (write_deepseek_vl2, "image", WIDE),
        (write_deepseek_ocr, "image", WIDE),
        (write_phi4mm, "image", WIDE),
        (write_llava_next, "image", WIDE),
    ],
)
def test_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, modality: str, item: Any
) -> None:
    """Rows that the model has made itself are answered as the item is."""
    mark = write(tmp_path)
    rows: list[torch.Tensor] = []
    encode = GivenRows.encode

    def kept(self: GivenRows, batch: Any) -> None:
        encode(self, batch)
        rows.extend(self.encoded[each.digest] for each in batch.encode)

    monkeypatch.setattr(GivenRows, "encode", kept)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    one = {"prompt": f"w5 {mark} w6", "multi_modal_data": {modality: item}}
    with open_media_llm(tmp_path, **ON, max_num_batched_tokens=512) as llm:
        (expected,) = llm.generate([one], params, use_tqdm=False)
        given = with_rows(one, f"{modality}_embeds", [rows[0]])
        (answer,) = llm.generate([given], params, use_tqdm=False)
    assert len(rows) == 1, "only the item was encoded"
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("name", "rows", "told"),
    [
        ("image_embeds", torch.ones(16, 32), r"expected a tensor \[items, rows, width\]"),
        ("image_embeds", "rows", r"expected a tensor \[items"),
        ("image_embeds", ["rows"], "expected a torch tensor or a numpy array"),
        ("image_embeds", [torch.ones(16)], r"expected the shape \[tokens, width\]"),
        ("image", torch.ones(1, 16, 33), r"the shape \[tokens, 32\]"),
        ("image_embeds", [torch.ones(0, 32)], "at least one row"),
        ("audio_embeds", torch.ones(1, 4, 32), "takes text, image only"),
        (
            "image",
            {"image_embeds": torch.ones(16, 32), "image_grid_thw": [1, 4, 4]},
            "this model needs only the rows of an item; leave out image_grid_thw",
        ),
    ],
)
def test_refused(llava: MediaReference, name: str, rows: Any, told: str) -> None:
    with open_media_llm(llava.directory, **ON) as llm, pytest.raises(RequestError, match=told):
        llm.generate([with_rows(prompt(5, WIDE), name, rows)], use_tqdm=False)


def test_off(llava: MediaReference) -> None:
    given = with_rows(prompt(5, WIDE), "image", rows_of(llava, WIDE))
    with (
        open_media_llm(llava.directory) as llm,
        pytest.raises(RequestError, match="enable_mm_embeds"),
    ):
        llm.generate([given], use_tqdm=False)


def test_a_model_that_takes_items_only(tmp_path: Path) -> None:
    test_fuyu_parity.write(tmp_path)
    given = {"prompt": "w5", "multi_modal_data": {"image": torch.ones(1, 4, 32)}}
    with (
        open_media_llm(tmp_path, **ON) as llm,
        pytest.raises(RequestError, match="takes items only"),
    ):
        llm.generate([given], use_tqdm=False)
