"""The comparison of vectors of texts and images with those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_media import open_media_llm
from torch.nn.functional import normalize

from pegboard_testing.contract_multimodal_processor import random_image


def picture(*size: int) -> dict[str, Any]:
    """Return a prompt of one image."""
    return {"prompt": "", "multi_modal_data": {"image": random_image(*size)}}


def expected_vector(
    model: Any, images: Any, token_ids: Callable[[str], Sequence[int]], prompt: Any
) -> torch.Tensor:
    """Return the normalized vector that transformers makes of a text or an image. images: its
    processor of images. token_ids: of a text."""
    with torch.no_grad():
        if isinstance(prompt, str):
            ids = torch.tensor([[*token_ids(prompt)]])
            vector = model.get_text_features(input_ids=ids).pooler_output
        else:
            pixels = images(prompt["multi_modal_data"]["image"], return_tensors="pt")
            vector = model.get_image_features(**pixels).pooler_output
    return normalize(vector[0], dim=0)


def check_vectors(
    expected: Callable[[Any], torch.Tensor], folder: Path, texts: Sequence[str], **chosen: Any
) -> None:
    """Compare the vectors of texts and images in either order, twice. expected: the vector of a
    prompt."""
    prompts = [picture(40, 20), *texts, picture(13, 50), picture(9, 9), texts[1]]
    with open_media_llm(folder, runner="pooling", **chosen) as llm:
        for _ in range(2):
            outputs = llm.embed(prompts, use_tqdm=False)
            for one, output in zip(prompts, outputs, strict=True):
                vector = torch.tensor(output.outputs.embedding)
                torch.testing.assert_close(vector, expected(one), atol=1e-4, rtol=0)
