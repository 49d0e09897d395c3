"""Images of every shape, which clients choose: they are answered or refused, and the engine
lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_internvl_chat_parity
import test_media_fallback
import test_mistral3_parity
import test_qwen_vl_parity
import test_tiles_parity
import torch
import transformers
from PIL import Image
from tiny_media import IMAGE, MEDIA_TEXT, VISION, make_tokenizer, open_media_llm, write_llava

from pegboard import SamplingParams
from pegboard.errors import RequestError

SIZES = [(1, 1), (1, 2), (5, 5), (29, 3), (1, 19), (60, 1), (1, 300), (3000, 1), (7, 2100)]
PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def write_tiles(family: str, tower: str, images: Any) -> Callable[[Path], object]:
    """Return what writes a LLaVA whose images are cut into tiles."""

    def write(folder: Path) -> None:
        torch.manual_seed(1)
        for_model = transformers.AutoConfig.for_model
        config = getattr(transformers, f"{family}Config")(
            vision_config=for_model(tower, **VISION),
            text_config=for_model("llama", **MEDIA_TEXT),
            image_token_index=IMAGE,
            image_grid_pinpoints=PINPOINTS,
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
        model.float().save_pretrained(folder)
        images.save_pretrained(folder)
        make_tokenizer(["<image>"], "<image>").save_pretrained(folder)

    return write


NEXT = transformers.LlavaNextImageProcessorPil(
    size={"shortest_edge": 16},
    crop_size={"height": 16, "width": 16},
    image_grid_pinpoints=PINPOINTS,
)
ONEVISION = transformers.LlavaOnevisionImageProcessorPil(
    size={"height": 16, "width": 16}, image_grid_pinpoints=PINPOINTS
)
FAMILIES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "llava": ("<image>", write_llava),
    "next": ("<image>", write_tiles("LlavaNext", "clip_vision_model", NEXT)),
    "onevision": ("<image>", write_tiles("LlavaOnevision", "siglip_vision_model", ONEVISION)),
    "idefics3": ("<image>", lambda folder: test_tiles_parity.write("idefics3", folder)),
    "internvl": ("<IMG_CONTEXT>", lambda folder: test_tiles_parity.write("internvl", folder)),
    "internvl_chat": ("<IMG_CONTEXT>", test_internvl_chat_parity.write),
    "mistral3": ("[IMG]", lambda folder: test_mistral3_parity.write("mistral3", folder)),
    "qwen2": (
        "<|image_pad|>",
        lambda folder: test_qwen_vl_parity.write(folder, "qwen2_vl", "as written"),
    ),
    "qwen2.5": (
        "<|image_pad|>",
        lambda folder: test_qwen_vl_parity.write(folder, "qwen2_5_vl", "as written"),
    ),
    **{
        f"{name}, by transformers": (family.mark, partial(test_media_fallback.write, family))
        for name, family in test_media_fallback.FAMILIES.items()
        if not family.options
    },
}


@pytest.mark.sampled(3)
@pytest.mark.one_rank
@pytest.mark.parametrize(("mark", "write"), FAMILIES.values(), ids=FAMILIES.keys())
def test_any_size(tmp_path: Path, mark: str, write: Callable[[Path], object]) -> None:
    write(tmp_path)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    answered = 0
    with open_media_llm(tmp_path, max_num_batched_tokens=512, max_model_len=400) as llm:
        for size in SIZES:
            media = {"image": Image.new("RGB", size, (9, 99, 200))}
            prompt = {"prompt": f"w1 {mark} w2", "multi_modal_data": media}
            try:
                answered += len(llm.generate([prompt], params, use_tqdm=False))
            except RequestError as refused:
                assert refused.parameter == "multi_modal_data.image[0]", size
    assert answered >= 4
