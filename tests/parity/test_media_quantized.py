"""LLaVA with quantized weights: its tower and its projector are plain, unless the checkpoint stores
them otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stored_layouts import CASES, FLOATS, quantize
from tiny_media import (
    MEDIA_TEXT,
    VISION,
    mean_error,
    open_media_llm,
    prompt,
    rows_of,
    some_prompts,
    write_llava,
)
from tiny_models import TOLERANCE
from transformers import AutoModelForImageTextToText

from pegboard import SamplingParams
from pegboard_testing.contract_multimodal_processor import random_image

pytestmark = pytest.mark.one_rank
FIRST = random_image(20, 20, 1)
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=-1, ignore_eos=True)
WIDE = {**MEDIA_TEXT, "model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
"""A language model whose matrices are whole groups of the quantized formats."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [*CASES, "fp8 at start", "rtn at start"])
def test_a_quantized_language_model(tmp_path: Path, case: str) -> None:
    """Stored formats, and plain weights that are quantized at start. The rows of images stay
    exact."""
    reference = write_llava(tmp_path, text_config=WIDE)
    settings: dict[str, Any] = {"block_size": 16}
    if case.endswith("at start"):
        settings |= {"quantization": case.split()[0], "download_dir": str(tmp_path / "cache")}
    else:
        quantize(reference, case, AutoModelForImageTextToText, "language_model")
    prompts = some_prompts()
    pixels = reference.inputs(prompt(1, FIRST))["pixel_values"][0]
    with open_media_llm(tmp_path, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        ((rows,),) = llm.apply_model(
            lambda model: model.encode("image", [{"pixel_values": pixels}])
        )
    torch.testing.assert_close(rows, rows_of(reference, FIRST)[0], rtol=0, atol=1e-4)
    error = mean_error(reference, prompts, outputs)
    assert error < TOLERANCE if case in FLOATS else 1e-3 < error < 0.2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", sorted(FLOATS))
def test_a_quantized_tower(tmp_path: Path, case: str) -> None:
    """Layers of the tower that are stored quantized are read so, next to plain ones. Processors may
    round to bfloat16 what they multiply with so many rows."""
    wide = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    vision = {**VISION, "model_type": "clip_vision_model", **wide}
    reference = write_llava(tmp_path, text_config=WIDE, vision_config=vision)
    plain = rows_of(reference, FIRST)[0]
    quantize(reference, case, AutoModelForImageTextToText)
    pixels = reference.inputs(prompt(1, FIRST))["pixel_values"][0]
    with open_media_llm(tmp_path, block_size=16) as llm:
        ((rows,),) = llm.apply_model(lambda each: each.encode("image", [{"pixel_values": pixels}]))
        outputs = llm.generate(some_prompts(), GREEDY, use_tqdm=False)
    away = (rows - rows_of(reference, FIRST)[0]).abs().mean()
    assert away < 0.25 * (rows - plain).abs().mean() and away < 0.01
    assert mean_error(reference, some_prompts(), outputs) < 0.02
