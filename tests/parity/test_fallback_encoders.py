"""Encoders that run transformers' modules, compared with transformers: vectors, classes and
scores of pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_converted_models import results_of, write
from test_token_results import normalized, states_of
from tiny_encoders import ARCHITECTURES, SIZES, TEXTS, VOCAB_SIZE, write_tokenizer
from tiny_models import open_llm, random_prompts

from pegboard import LLM, PoolingParams
from pegboard.errors import ModelError

ROBERTA = {**SIZES, "pad_token_id": 1, "type_vocab_size": 2}
TINY: dict[str, dict[str, Any]] = {
    "Electra": {**SIZES, "embedding_size": 16, "pad_token_id": 0},
    "Ernie": {**SIZES, "pad_token_id": 0, "use_task_id": True, "task_type_vocab_size": 3},
    "EuroBert": {
        **SIZES,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "classifier_pooling": "bos",
    },
    "Camembert": ROBERTA,
    "Data2VecText": ROBERTA,
    "RobertaPreLayerNorm": ROBERTA,
    "XLMRobertaXL": ROBERTA,
    "Bert": SIZES,
    "Roberta": ARCHITECTURES["Roberta"],
    "ModernBert": {
        **SIZES,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
    },
}
"""The last three have a plugin of their own, which is used without model_impl."""
OWN = ("Bert", "Roberta", "ModernBert")


def make(folder: Path, name: str, head: str = "Model", **values: Any) -> tuple[Any, Any]:
    """Write an encoder. Returns the model and its tokenizer."""
    torch.manual_seed(3)
    kind = getattr(transformers, name + head)
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 66, **TINY[name], **values}
    model = kind(kind.config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return model, write_tokenizer(folder, is_roberta=TINY[name].get("pad_token_id") == 1)


def open_tiny(folder: Path, name: str, **more: Any) -> LLM:
    """Open an engine whose steps have several prompts."""
    settings = {"dtype": "float32", "max_num_batched_tokens": 80, "max_num_seqs": 3, **more}
    if name in OWN:
        settings["model_impl"] = "transformers"
    llm = LLM(str(folder), **settings)
    module = type(llm.apply_model(lambda model: model)[0]).__module__
    assert module == "pegboard_model_transformers.encoders"
    return llm


def states(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("name", TINY)
def test_vectors(name: str, tmp_path: Path) -> None:
    """Of prompts together with others, and alone."""
    model, tokenizer = make(tmp_path, name)
    for pooling in ("CLS", "MEAN"):
        with open_tiny(tmp_path, name, pooler_config={"pooling_type": pooling}) as llm:
            outputs = llm.embed(TEXTS * 2, use_tqdm=False)
            outputs += llm.embed(TEXTS[2], use_tqdm=False)
        for text, output in zip([*TEXTS * 2, TEXTS[2]], outputs, strict=True):
            hidden = states(model, tokenizer(text)["input_ids"])
            true = normalized(hidden[0] if pooling == "CLS" else hidden.mean(0))
            assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-5
