"""Rows of images in place of the images, for models whose images have a form: rows that the model
has made itself are answered as transformers answers the images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import test_glm4v_parity
import test_mistral3_parity
import test_qwen3_vl_parity
import test_qwen_omni_parity
import test_qwen_vl_parity
import test_tiles_parity
import torch
from tiny_media import MediaReference, Prompt, check_output, open_media_llm
from tiny_models import divide
from transformers import AutoImageProcessor

from pegboard import LLM, SamplingParams
from pegboard.errors import RequestError
from pegboard.worker.given_rows import GivenRows
from pegboard_testing.contract_multimodal_processor import random_image

WIDE = random_image(40, 20, seed=1)
TALL = random_image(13, 50, seed=2)
ON = {"enable_mm_embeds": True, "max_num_batched_tokens": 16, "max_model_len": 256}
PARAMS = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
Arrays = Mapping[str, Any]
Form = dict[str, torch.Tensor]


def grid_of(folder: Path, image: Any, arrays: Arrays) -> Form:
    """Return the form of Qwen-VL."""
    grid = arrays["image_grid_thw"]
    return {"image_grid_thw": torch.frombuffer(bytearray(grid.data), dtype=torch.int64)}


def size_of(folder: Path, image: Any, arrays: Arrays) -> Form:
    """Return the form of Pixtral."""
    return {"image_sizes": torch.tensor(arrays["pixel_values"].shape[1:])}


def tiles_of(folder: Path, image: Any, arrays: Arrays) -> Form:
    """Return the form of Idefics 3."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tiles = processor(image, return_row_col_info=True)
    return {name: torch.tensor(tiles[name][0]) for name in ("rows", "cols")}


class Family(NamedTuple):
    """A model with rows of a form. mark: stands for an image."""

    write: Callable[[Path], MediaReference]
    mark: str
    form: Callable[[Path, Any, Arrays], Form] = grid_of
    options: Mapping[str, Any] = {}


def qwen_vl(kind: str) -> Family:
    return Family(
        lambda folder: test_qwen_vl_parity.write(folder, kind, "older"), test_qwen_vl_parity.MARK
    )


def qwen_omni(kind: str) -> Family:
    options = {"mm_processor_kwargs": test_qwen_omni_parity.LIMITS}
    mark = test_qwen_omni_parity.MARKS[kind]["image"]
    return Family(lambda folder: test_qwen_omni_parity.write(folder, kind), mark, options=options)


FAMILIES = {
    "qwen2_vl": qwen_vl("qwen2_vl"),
    "qwen2_5_vl": qwen_vl("qwen2_5_vl"),
    "qwen3_vl": Family(
        lambda folder: test_qwen3_vl_parity.write(folder, "qwen3_vl"), test_qwen_vl_parity.MARK
    ),
    "qwen2_5_omni": qwen_omni("qwen2_5_omni"),
    "qwen3_omni_moe": qwen_omni("qwen3_omni_moe"),
    "glm4v": Family(
        lambda folder: test_glm4v_parity.write(folder, "glm4v"), test_glm4v_parity.MARK
    ),
    "mistral3": Family(
        lambda folder: test_mistral3_parity.write("mistral3", folder), "[IMG]", size_of
    ),
    "pixtral": Family(lambda folder: test_mistral3_parity.write("llava", folder), "[IMG]", size_of),
    "idefics3": Family(
        lambda folder: test_tiles_parity.write("idefics3", folder)[0], "<image>", tiles_of
    ),
}


class Given(NamedTuple):
    rows: torch.Tensor
    form: Form

    @property
    def mapping(self) -> dict[str, torch.Tensor]:
        return {"image_embeds": self.rows, **self.form}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, Arrays]]:
    """Return the rows of all items that will be encoded, and the arrays they are made of."""
    items: list[tuple[torch.Tensor, Arrays]] = []
    encode = GivenRows.encode

    def kept(self: GivenRows, batch: Any) -> None:
        encode(self, batch)
        items.extend((self.encoded[each.digest], each.arrays) for each in batch.encode)

    monkeypatch.setattr(GivenRows, "encode", kept)
    return items


def prompt(family: Family, *images: Any) -> Prompt:
    text = " ".join(f"w{number} {family.mark}" for number in range(5, 5 + len(images)))
    media = {"multi_modal_data": {"image": [*images]}}
    return {"prompt": f"{text} w9 w8", **media, **family.options}


def with_rows(one: Prompt, data: Mapping[str, Any]) -> Prompt:
    return {**one, "multi_modal_data": data}


def made(llm: LLM, family: Family, folder: Path, encoded: Any) -> list[Given]:
    """Return the rows and the forms of both images."""
    items = []
    for image in (WIDE, TALL):
        llm.generate([prompt(family, image)], PARAMS, use_tqdm=False)
        rows, arrays = encoded[-1]
        items.append(Given(rows, family.form(folder, image, arrays)))
    return items


def stacked(items: list[Given], rows: Any) -> dict[str, Any]:
    """Return vLLM's mapping of several items."""
    names = items[0].form
    form = {name: torch.stack([item.form[name] for item in items]) for name in names}
    return {"image_embeds": rows, **form}


def check_given(family: Family, folder: Path, encoded: Any) -> None:
    """Check rows in each form, beside images, and twice, so that prefixes come from the cache."""
    reference = family.write(folder)
    one, two = prompt(family, WIDE), prompt(family, TALL, WIDE)
    with open_media_llm(folder, **ON) as llm:
        wide, tall = made(llm, family, folder, encoded)
        count = len(encoded)
        both = [tall, wide]
        given = [
            (one, with_rows(one, {"image": wide.mapping})),
            (one, with_rows(one, {"image_embeds": [wide.mapping]})),
            (two, with_rows(two, {"image": [each.mapping for each in both]})),
            (two, with_rows(two, {"image": stacked(both, [each.rows for each in both])})),
            (two, with_rows(two, {"image": [tall.mapping, WIDE]})),
            (two, with_rows(two, {"image": [TALL, wide.mapping]})),
        ]
        if family.form is grid_of:
            rows = torch.cat([each.rows for each in both])
            given.append((two, with_rows(two, {"image": stacked(both, rows)})))
        prompts = [each for _, each in given]
        runs = [llm.generate(prompts, PARAMS, use_tqdm=False) for _ in range(2)]
    assert len(encoded) == count, "the images are still kept, and the rows are not encoded"
    assert all(answer.num_cached_tokens for answer in runs[1])
    for run in runs:
        for (images, _), answer in zip(given, run, strict=True):
            check_output(reference, images, answer.outputs[0], 1e-4)


@pytest.mark.sampled(3)
@pytest.mark.one_rank
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, tmp_path: Path, encoded: Any) -> None:
    check_given(FAMILIES[name], tmp_path, encoded)


@pytest.mark.one_rank
def test_another_grid_is_not_the_same_prefix(tmp_path: Path, encoded: Any) -> None:
    """The rows are the same, and the positions are not."""
    family = FAMILIES["qwen2_5_vl"]
    family.write(tmp_path)
    with open_media_llm(tmp_path, **ON) as llm:
        wide, _ = made(llm, family, tmp_path, encoded)
        frames, height, width = wide.form["image_grid_thw"].tolist()
        assert height != width
        turned = {**wide.mapping, "image_grid_thw": [frames, width, height]}
        prompts = [
            with_rows(prompt(family, WIDE), {"image": each})
            for each in (wide.mapping, wide.mapping, turned)
        ]
        first, again, other = [llm.generate([each], PARAMS, use_tqdm=False)[0] for each in prompts]
    assert first.prompt_token_ids == other.prompt_token_ids
    assert again.num_cached_tokens == 12
    assert other.num_cached_tokens == 4, "the first two rows have the same positions"


@pytest.mark.one_rank
def test_rows_of_audio(tmp_path: Path, encoded: Any) -> None:
    """Qwen-Omni's have no form."""
    kind = "qwen2_5_omni"
    reference = test_qwen_omni_parity.write(tmp_path, kind)
    one = test_qwen_omni_parity.prompt(kind, 5, test_qwen_omni_parity.tone(9_000, 1), 6, 7)
    with open_media_llm(tmp_path, **ON) as llm:
        llm.generate([one], PARAMS, use_tqdm=False)
        ((rows, _),) = encoded
        given = with_rows(one, {"audio_embeds": [rows]})
        (answer,) = llm.generate([given], PARAMS, use_tqdm=False)
        with pytest.raises(RequestError, match="Leave the rest out"):
            wrong = {"audio_embeds": rows, "audio_num_tokens": [len(rows)]}
            llm.generate([with_rows(one, {"audio": wrong})], PARAMS, use_tqdm=False)
    check_output(reference, one, answer.outputs[0], 1e-4)


def test_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the levels beside them, in two stages of two ranks."""
    family = FAMILIES["qwen3_vl"]
    reference = family.write(tmp_path)
    one = prompt(family, WIDE)
    with torch.no_grad():
        images = reference.inputs(one)
        output = reference.model.model.get_image_features(
            images["pixel_values"], images["image_grid_thw"]
        )
    rows = torch.cat([*output.pooler_output, *map(torch.cat, output.deepstack_features)], 1)
    divide(monkeypatch, 2, 2)
    given = {"image_embeds": rows, "image_grid_thw": images["image_grid_thw"]}
    with open_media_llm(tmp_path, **ON) as llm:
        (answer,) = llm.generate([with_rows(one, {"image": given})], PARAMS, use_tqdm=False)
    check_output(reference, one, answer.outputs[0], 1e-4)


ROWS = torch.ones(8, 32)
GRID = [1, 4, 8]
BAD: dict[str, tuple[Any, str]] = {
    "no grid": (ROWS[None], r"image\[0\]: beside the rows .* came nothing; .*image_grid_thw, "),
    "another name": (
        {"image_embeds": ROWS, "image_sizes": [4, 8]},
        "came .'image_sizes': .4, 8..; this model needs image_grid_thw",
    ),
    "one name more": (
        {"image_embeds": ROWS, "image_grid_thw": GRID, "second_per_grid_ts": [1]},
        "and nothing else",
    ),
    "no rows": ({"image_grid_thw": GRID}, "expected a mapping with image_embeds, got the names"),
    "nothing": ({}, "expected a mapping with image_embeds"),
    "rows of audio": ({"audio_embeds": ROWS, "image_grid_thw": GRID}, "mapping with image_embeds"),
    "another grid": ({"image_embeds": ROWS, "image_grid_thw": [1, 4, 4]}, "the image has 8 rows"),
    "half a patch": ({"image_embeds": ROWS, "image_grid_thw": [1, 3, 8]}, "multiples of 2"),
    "fractions": ({"image_embeds": ROWS, "image_grid_thw": [1.0, 4, 8]}, "whole numbers"),
    "text": ({"image_embeds": ROWS, "image_grid_thw": "1 4 8"}, "whole numbers"),
    "lines of several lengths": (
        {"image_embeds": ROWS, "image_grid_thw": [[1], [2, 3]]},
        r"image.image_grid_thw: expected whole numbers \[items, numbers\]",
    ),
    "many numbers": (
        {"image_embeds": ROWS, "image_grid_thw": np.ones((2000, 3), np.int32)},
        "at most 4096",
    ),
    "huge numbers": ({"image_embeds": ROWS, "image_grid_thw": [1, 2**70, 8]}, "whole numbers"),
    "rows that cannot be shared out": (
        {"image_embeds": ROWS, "image_grid_thw": [GRID, [1, 8, 8]]},
        "8 rows cannot be shared out to 2 grids",
    ),
    "grids of nothing": (
        {"image_embeds": ROWS, "image_grid_thw": [[1, 0, 8], [1, -4, 8]]},
        "8 rows cannot be shared out",
    ),
    "more rows than grids": (
        {"image_embeds": [ROWS, ROWS], "image_grid_thw": [GRID]},
        "the rows of 2 items, and image_grid_thw is of 1",
    ),
    "two items for one place": (
        {"image_embeds": torch.cat([ROWS, ROWS]), "image_grid_thw": [GRID, GRID]},
        "fewer placeholders",
    ),
    "too wide": ({"image_embeds": torch.ones(8, 33), "image_grid_thw": GRID}, r"\[tokens, 32\]"),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("qwen")
    FAMILIES["qwen2_5_vl"].write(folder)
    with open_media_llm(folder, **ON) as llm:
        yield llm


@pytest.mark.parametrize("name", BAD)
def test_refused(qwen: LLM, name: str) -> None:
    data, told = BAD[name]
    one = prompt(FAMILIES["qwen2_5_vl"], WIDE)
    with pytest.raises(RequestError, match=told):
        qwen.generate([with_rows(one, {"image": data})], use_tqdm=False)


def test_a_chat(qwen: LLM) -> None:
    """A part has the rows of one item."""
    part = {"image_embeds": ROWS, "image_grid_thw": GRID}
    content = [{"type": "image_embeds", "image_embeds": part}, {"type": "text", "text": "w4"}]
    (answer,) = qwen.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
    assert answer.prompt_token_ids.count(test_qwen_vl_parity.IMAGE) == 8
    part = {"image_embeds": torch.cat([ROWS, ROWS]), "image_grid_thw": [GRID, GRID]}
    content[0] = {"type": "image_embeds", "image_embeds": part}
    with pytest.raises(RequestError, match="the rows of one item, got those of 2"):
        qwen.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
