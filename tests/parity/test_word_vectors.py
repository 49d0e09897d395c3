"""Encoders with a head for words, compared with transformers: vectors of states, and vectors as
long as the vocabulary (SPLADE)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_encoder_parity import states
from test_rotated_encoder_parity import write as write
from tiny_encoders import ARCHITECTURES, TEXTS, VOCAB_SIZE
from tiny_models import nightly

from pegboard import LLM, PoolingParams
from pegboard.errors import ConfigError, ModelError, RequestError

HEAD = "ForMaskedLM"
FAST = ("Bert", "DistilBert")
NAMES = [*ARCHITECTURES, "ModernBert"]
RARE = [name for name in NAMES if name not in FAST]
OVERRIDES = {"architectures": ["BertSpladeSparseEmbeddingModel"]}


def declare_splade(folder: Path, **config: str) -> None:
    """Write the files of sentence-transformers."""
    place = "sentence_transformers.sparse_encoder.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{place}MLMTransformer.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_Pool", "type": f"{place}SpladePooling.SpladePooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pool").mkdir(exist_ok=True)
    (folder / "1_Pool" / "config.json").write_text(json.dumps(config))


def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.mark.parametrize("name", nightly(NAMES, *RARE))
def test_vectors_of_words(
    name: str,
    write_encoder: Callable[..., Any],
    write: Callable[..., Any],
    open_encoder: Callable[..., LLM],
) -> None:
    """One checkpoint as it is, which makes vectors of states, and with two files of
    sentence-transformers."""
    writer = write_encoder if name in ARCHITECTURES else write
    folder, model, tokenizer = writer(name, HEAD)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    with open_encoder(folder) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    for row, output in zip(ids, outputs, strict=True):
        true = states(model.base_model, row)[0]
        assert (torch.tensor(output.outputs.embedding) - true / true.norm()).abs().max() < 1e-5
    for config, pooled in (
        ({"pooling_strategy": "max"}, lambda values: values.log1p().amax(0)),
        (
            {"pooling_strategy": "sum", "activation_function": "log1p_relu"},
            lambda values: values.log1p().log1p().sum(0),
        ),
    ):
        declare_splade(folder, **config)
        with open_encoder(folder) as llm:
            outputs = llm.embed(TEXTS, use_tqdm=False)
            (alone,) = llm.embed(TEXTS[4], use_tqdm=False)
        for row, output in zip([*ids, ids[4]], [*outputs, alone], strict=True):
            true = pooled(logits_of(model, row).relu())
            assert len(output.outputs.embedding) == VOCAB_SIZE
            assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-4


def test_a_name_that_asks_for_words(
    write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    """As vLLM's users set it, without files of sentence-transformers."""
    folder, model, tokenizer = write_encoder("Bert", HEAD)
    true = logits_of(model, tokenizer(TEXTS[4])["input_ids"]).relu().log1p().amax(0)
    with LLM(str(folder), hf_overrides=OVERRIDES, dtype="bfloat16") as llm:
        (rough,) = llm.embed(TEXTS[4], use_tqdm=False)
    assert torch.cosine_similarity(torch.tensor(rough.outputs.embedding), true, dim=0) > 0.99
    with open_encoder(folder, hf_overrides=OVERRIDES) as llm:
        (output,) = llm.embed(TEXTS[4], use_tqdm=False)
        params = PoolingParams(use_activation=True)
        (unit,) = llm.embed(TEXTS[4], pooling_params=params, use_tqdm=False)
        with pytest.raises(RequestError, match="makes one result for a prompt, and none for its"):
            llm.encode(TEXTS[0], pooling_task="token_embed", use_tqdm=False)
    assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-4
    assert (torch.tensor(unit.outputs.embedding) - true / true.norm()).abs().max() < 1e-5
    with pytest.raises(ConfigError, match="this model pools logits, by 'MAX'"):
        open_encoder(folder, hf_overrides=OVERRIDES, pooler_config={"pooling_type": "CLS"})
    declare_splade(folder, pooling_strategy="mean")
    with pytest.raises(ModelError, match="pooling_strategy is 'mean'; expected max or sum"):
        open_encoder(folder)
    declare_splade(folder)
    with pytest.raises(ModelError, match="needs the logits of words, and BertModel has none"):
        open_encoder(folder, hf_overrides={"architectures": ["BertModel"]})
