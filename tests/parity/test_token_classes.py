"""Encoders with a class for each token, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rotated_encoder_parity import write as write
from tiny_encoders import ARCHITECTURES, TEXTS
from tiny_models import nightly

from pegboard import LLM, PoolingParams
from pegboard.errors import RequestError

HEAD = "ForTokenClassification"
FAST = ("Bert", "DistilBert", "ModernBert")
RARE = [name for name in ARCHITECTURES if name not in FAST]


@pytest.mark.parametrize("name", nightly([*ARCHITECTURES, "ModernBert"], *RARE))
def test_classes_of_tokens(
    name: str,
    write_encoder: Callable[..., Any],
    write: Callable[..., Any],
    open_encoder: Callable[..., LLM],
) -> None:
    """Prompts together, and one alone. Nothing else is done by such a model."""
    writer = write_encoder if name in ARCHITECTURES else write
    folder, model, tokenizer = writer(name, HEAD, num_labels=3)
    with open_encoder(folder) as llm:
        together = llm.encode(TEXTS, use_tqdm=False)
        (alone,) = llm.reward(
            TEXTS[4], pooling_params=PoolingParams(use_activation=False), use_tqdm=False
        )
        assert llm.llm_engine.plan.pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        message = r"makes a result for each token \(task token_classify\), and none for the prompt"
        with pytest.raises(RequestError, match=message):
            llm.classify(TEXTS[0], use_tqdm=False)
        with pytest.raises(RequestError, match="it cannot embed"):
            llm.embed(TEXTS[0], use_tqdm=False)
        with pytest.raises(RequestError, match="it cannot classify"):
            llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
    for text, output in zip(TEXTS, together, strict=True):
        with torch.no_grad():
            true = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
        assert output.outputs.data.shape == true.shape
        assert (torch.from_numpy(output.outputs.data) - true.softmax(-1)).abs().max() < 1e-5
    assert (torch.from_numpy(alone.outputs.data) - true).abs().max() < 1e-4
