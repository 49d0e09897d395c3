"""Gemma 3 and PaliGemma, whose tokens attend to those after them: the rows and logits of
transformers, however the prompts are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_gemma_vision.gemma3 import Gemma3Vision
from pegboard_model_gemma_vision.paligemma import PaliGemma
from tiny_media import (
    MEDIA_TEXT,
    VISION,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    check_output,
    make_media_model,
    make_tokenizer,
    open_media_llm,
    prompt,
    some_prompts,
)
from tiny_models import divide
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pegboard import SamplingParams
from pegboard.errors import RequestError
from pegboard_testing.contract_multimodal_processor import random_image

SIDE = VISION["image_size"]
SIZE = {"height": SIDE, "width": SIDE}
TOWER = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
MARKS = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.5,
}
TEXT = {
    **MEDIA_TEXT,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 12,
    "query_pre_attn_scalar": 16,
    "head_dim": 16,
    "pad_token_id": 0,
}


@dataclass
class TypedReference(MediaReference):
    """A transformers model that gets the type of each token. output_type: of outputs."""

    output_type: int = 0

    def logprobs(self, prompt: Prompt, outputs: Sequence[int]) -> torch.Tensor:
        given = dict(self.inputs(prompt))
        given.pop("labels", None)
        ids = torch.cat([given["input_ids"], torch.tensor([list(outputs)], dtype=torch.long)], 1)
        types = torch.full_like(ids, self.output_type)
        types[:, : given["token_type_ids"].shape[1]] = given["token_type_ids"]
        given |= {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": types,
        }
        with torch.no_grad():
            logits = self.model(**given).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def gemma3(folder: Path, *, text: Mapping[str, Any] | None = None, **images: Any) -> MediaReference:
    """Write a Gemma 3 whose images have four rows, or `rows`. images: options of the processor."""
    rows = images.pop("rows", 4)
    model = make_media_model(
        "gemma3",
        text_config={"model_type": "gemma3_text", **TEXT, **(text or {})},
        vision_config=TOWER,
        mm_tokens_per_image=rows,
        boi_token_index=100,
        image_token_index=101,
        eoi_token_index=102,
    )
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(MARKS, MARKS[0])
    names = {"boi_token": MARKS[0], "image_token": MARKS[1], "eoi_token": MARKS[2]}
    tokenizer._set_model_specific_special_tokens(names)
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size=SIZE),
        tokenizer=tokenizer,
        image_seq_length=rows,
    )
    processor.save_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, torch.Tensor]:
        given = one.get("multi_modal_data", {}).get("image")
        options = images if given else {}
        return dict(processor(text=one["prompt"], images=given, return_tensors="pt", **options))

    return TypedReference(folder, model, inputs)


def paligemma(folder: Path, kind: str = "gemma2", window: int = 200) -> MediaReference:
    caps = {"final_logit_softcapping": 20.0, "attn_logit_softcapping": 30.0}
    text = {**TEXT, **caps, "model_type": kind, "sliding_window": window}
    if kind == "gemma":
        text = {"model_type": kind, **MEDIA_TEXT, "head_dim": 16, "pad_token_id": 0}
    model = make_media_model(
        "paligemma",
        text_config=text,
        vision_config=TOWER,
        image_token_index=100,
        projection_dim=text["hidden_size"],
    )
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(["<image>", "<bos>"], "<image>")
    tokenizer.bos_token = "<bos>"
    images = SiglipImageProcessorPil(size=SIZE)
    images.image_seq_length = (SIDE // VISION["patch_size"]) ** 2
    processor = PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer)
    processor.save_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, torch.Tensor]:
        if "multi_modal_data" in one:
            return dict(
                processor(
                    text=one["prompt"], images=one["multi_modal_data"]["image"], return_tensors="pt"
                )
            )
        ids = torch.tensor([tokenizer.encode(one["prompt"])])
        return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}

    return TypedReference(folder, model, inputs, output_type=1)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def pali(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return paligemma(tmp_path_factory.mktemp("paligemma"))


def pali_prompts() -> list[Prompt]:
    """Return prompts with one image before the text, and without one."""
    wide = random_image(40, 20, seed=1)
    tall = random_image(13, 50, seed=2)
    return [prompt(wide, 5, 6, 7), prompt(tall, *range(8, 40)), prompt(wide, 5, 9), prompt(3, 4, 5)]


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks around items": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "few rows": {
        "max_num_batched_tokens": 64,
        "max_num_encoder_input_tokens": 5,
        "encoder_cache_size": 9,
    },
    "short chunks": {"long_prefill_token_threshold": 2, "max_num_batched_tokens": 30},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
    "torch": {"attention_backend": "cpu_paged", "max_num_batched_tokens": 24},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_gemma3(gemma: MediaReference, settings: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(gemma, some_prompts(MARKS[0]), repeats=2, **settings)


PALI_SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "one at a time": {"max_num_batched_tokens": 52, "max_num_seqs": 4},
    "short chunks": {"long_prefill_token_threshold": 2, "max_num_batched_tokens": 60},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 60},
    "torch": {"attention_backend": "cpu_paged", "max_num_batched_tokens": 60},
}


@pytest.mark.parametrize("settings", PALI_SETTINGS.values(), ids=PALI_SETTINGS.keys())
def test_paligemma(pali: MediaReference, settings: dict[str, Any]) -> None:
    """Prompts with the same begin, whose keys differ. Twice: the second time, the prompts are in
    the cache."""
    check_media(pali, pali_prompts(), repeats=2, **settings)


STEP = {"max_num_batched_tokens": 60}


def test_the_first_paligemma(tmp_path: Path) -> None:
    check_media(paligemma(tmp_path, "gemma"), pali_prompts(), **STEP)


def test_pan_and_scan(tmp_path: Path) -> None:
    """Crops are images of their own, which do not attend to each other's later tokens."""
    reference = gemma3(tmp_path, **PAN_AND_SCAN)
    crops = reference.inputs(some_prompts(MARKS[0])[0])["pixel_values"]
    assert len(crops) == 3, "an image and two crops"
    settings = {"mm_processor_kwargs": PAN_AND_SCAN, "max_num_batched_tokens": 8}
    check_media(reference, some_prompts(MARKS[0]), max_num_seqs=4, **settings)


def test_preempted(gemma: MediaReference) -> None:
    """There is room for one of the prompts and a half."""
    images = [random_image(20, 20, number) for number in range(4)]
    many = [prompt(n, each, 5, *range(9), mark=MARKS[0]) for n, each in enumerate(images)]
    settings = {"num_gpu_blocks_override": 40, "max_model_len": 40, "max_num_batched_tokens": 8}
    check_media(gemma, many, num_tokens=20, max_num_seqs=4, **settings)


def test_preempted_paligemma(pali: MediaReference) -> None:
    many = [prompt(random_image(20, 20, number), number, 5) for number in range(4)]
    settings = {"num_gpu_blocks_override": 36, "max_model_len": 40, "max_num_batched_tokens": 24}
    check_media(pali, many, num_tokens=16, **settings)


@pytest.mark.parametrize("kind", ["gemma", "pali"])
def test_several_answers(kind: str, request: pytest.FixtureRequest) -> None:
    """The other completions compute the last token of the prompt, which may be in an item."""
    reference = request.getfixturevalue(kind)
    prompts = some_prompts(MARKS[0]) if kind == "gemma" else pali_prompts()
    params = SamplingParams(
        max_tokens=5, temperature=1.0, top_k=1, n=2, logprobs=-1, ignore_eos=True
    )
    with open_media_llm(reference.directory, **STEP) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            check_output(reference, one, answer, 1e-4)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["gemma", "pali"])
def test_divided(
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    stages: int,
) -> None:
    divide(monkeypatch, ranks, stages)
    prompts = some_prompts(MARKS[0]) if kind == "gemma" else pali_prompts()
    check_media(request.getfixturevalue(kind), prompts, **STEP)


@pytest.mark.parametrize(("ranks", "keys", "rows"), [(4, 2, 1), (1, 1, 2)])
def test_shared_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, keys: int, rows: int
) -> None:
    """Ranks share out the tokens of the layers without a window."""
    shared = {"decode_context_parallel_size": keys, "prefill_context_parallel_size": rows}
    divide(monkeypatch, ranks, 1, **shared)
    reference = gemma3(tmp_path, text={"num_attention_heads": 4, "num_key_value_heads": 2})
    check_media(reference, some_prompts(MARKS[0]), repeats=2, **STEP)


def test_an_item_that_no_step_can_compute_is_refused(tmp_path: Path) -> None:
    reference = gemma3(tmp_path, rows=16)
    with open_media_llm(tmp_path, max_num_batched_tokens=15, max_num_seqs=4) as llm:
        with pytest.raises(RequestError, match="item at token 2 has 16 tokens.*raise it"):
            llm.generate(some_prompts(MARKS[0])[:1], use_tqdm=False)
        assert llm.generate("w5 w6", use_tqdm=False)[0].outputs[0].token_ids
    assert reference.directory == tmp_path


def test_a_prompt_that_no_step_can_compute_is_refused(pali: MediaReference) -> None:
    with (
        open_media_llm(pali.directory, max_num_batched_tokens=16, max_num_seqs=4) as llm,
        pytest.raises(RequestError, match="the prompt has 20 tokens.*max_num_batched_tokens=16"),
    ):
        llm.generate(pali_prompts()[:1], use_tqdm=False)


@pytest.mark.parametrize("side", [1, 2, 4])
def test_rows_of_gemma3(tmp_path: Path, side: int) -> None:
    reference = gemma3(tmp_path, rows=side * side)
    check_rows(reference, Gemma3Vision, (2, 3, SIDE, SIDE))


@pytest.mark.parametrize("older", [False, True])
def test_rows_of_paligemma(pali: MediaReference, older: bool) -> None:
    check_rows(pali, PaliGemma, (3, SIDE, SIDE), older)


def check_rows(
    reference: MediaReference, kind: Any, shape: tuple[int, ...], older: bool = False
) -> None:
    """Compare the rows of two images. older: of checkpoints of another layout."""

    def layout(name: str) -> str:
        moved = name.removeprefix("model.") if "vision_tower" in name else name
        return moved.replace("vision_tower.", "vision_tower.vision_model.") if older else name

    ours, _ = built_model(kind, reference.directory, layout)
    pixels = [torch.randn(shape) for _ in range(2)]
    rows = ours.encode("image", [{"pixel_values": each} for each in pixels])
    with torch.no_grad():
        for each, made in zip(pixels, rows, strict=True):
            images = each.reshape(-1, 3, SIDE, SIDE)
            expected = reference.model.model.get_image_features(images).pooler_output.flatten(0, 1)
            torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
