"""Vectors of prompts with images, from a LLaVA: those of transformers' last hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_media import MediaReference, Prompt, open_media_llm, prompt, some_prompts, write_llava

from pegboard import PoolingParams
from pegboard.errors import RequestError
from pegboard_testing.contract_multimodal_processor import random_image


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


def expected(llava: MediaReference, one: Prompt, pooling: str) -> torch.Tensor:
    given = dict(llava.inputs(one))
    with torch.no_grad():
        states = llava.model.model(**given).last_hidden_state[0]
    vector = states[-1] if pooling == "LAST" else states.mean(0)
    return torch.nn.functional.normalize(vector, dim=0)


@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
@pytest.mark.parametrize("budget", [512, 64])
def test_vectors(llava: MediaReference, pooling: str, budget: int) -> None:
    """Also where the items of all prompts do not fit into one step."""
    settings: dict[str, Any] = {
        "runner": "pooling",
        "pooler_config": {"pooling_type": pooling},
        "max_num_batched_tokens": budget,
        "max_model_len": 64,
        "max_num_encoder_input_tokens": 32,
        "encoder_cache_size": 40,
    }
    # the last one has more images than the encoder's limit of a step
    prompts = [*some_prompts(), prompt(*(random_image(9, 9, seed) for seed in range(3)))]
    with open_media_llm(llava.directory, **settings) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        with pytest.raises(RequestError, match="cannot be truncated"):
            params = PoolingParams(truncate_prompt_tokens=5)
            llm.embed(prompts[:1], pooling_params=params, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        vector = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(vector, expected(llava, one, pooling), rtol=0, atol=1e-4)
