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
    "DistilBert": ARCHITECTURES["DistilBert"],
    "XLMRoberta": ARCHITECTURES["XLMRoberta"],
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
OWN = ("Bert", "DistilBert", "Roberta", "XLMRoberta", "ModernBert")
"""Those with a plugin of their own, which is used without model_impl."""


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


@pytest.mark.parametrize("name", TINY)
def test_classes(name: str, tmp_path: Path) -> None:
    """Of prompts and of tokens, without their activation."""
    for head, task in (
        ("ForSequenceClassification", "classify"),
        ("ForTokenClassification", "token_classify"),
    ):
        model, tokenizer = make(tmp_path / head, name, head, num_labels=3)
        with open_tiny(tmp_path / head, name) as llm:
            params = PoolingParams(use_activation=False)
            outputs = llm.encode(TEXTS, params, pooling_task=task, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            with torch.no_grad():
                true = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
            assert (torch.as_tensor(output.outputs.data) - true).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Electra", "Ernie", "Camembert", "Bert"])
def test_scores_of_pairs(name: str, tmp_path: Path) -> None:
    """The second text has another token type, if the model has several."""
    model, tokenizer = make(tmp_path, name, "ForSequenceClassification", num_labels=1)
    seconds = ["w20 w21", "w30 w31 w32 w33 w34"]
    has_types = TINY[name].get("pad_token_id") != 1
    with open_tiny(tmp_path, name) as llm:
        outputs = llm.score("w1 w2 w3", seconds, use_tqdm=False)
    for second, output in zip(seconds, outputs, strict=True):
        encoded = tokenizer(
            "w1 w2 w3", second, return_tensors="pt", return_token_type_ids=has_types
        )
        with torch.no_grad():
            true = model(**encoded).logits[0].sigmoid()
        assert abs(output.outputs.score - float(true)) < 1e-5


@pytest.mark.parametrize("name", ["Electra", "EuroBert", "Camembert"])
def test_bfloat16(name: str, tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path, name)
    with open_tiny(tmp_path, name, dtype="bfloat16") as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        true = normalized(states(model, tokenizer(text)["input_ids"])[0])
        assert torch.dot(torch.tensor(output.outputs.embedding), true) > 0.995


def test_a_checkpoint_with_another_head(tmp_path: Path) -> None:
    """Its tensors begin with the model's name, and its head is not read."""
    model, tokenizer = make(tmp_path, "Electra", "ForPreTraining")
    overrides = {"architectures": ["ElectraModel"]}
    with open_tiny(tmp_path, "Electra", hf_overrides=overrides) as llm:
        (output,) = llm.embed(TEXTS[:1], use_tqdm=False)
    true = normalized(states(model.electra, tokenizer(TEXTS[0])["input_ids"])[0])
    assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-5


@pytest.mark.parametrize("is_said", [True, False])
@pytest.mark.parametrize(
    "architecture", ["LlamaModel", "MistralModel", "LlamaForSequenceClassification"]
)
def test_decoders_that_attend_both_ways(architecture: str, is_said: bool, tmp_path: Path) -> None:
    """Their configs say so, or only their names, which also choose the mean. Mistral has a window,
    which is shorter than the prompts."""
    window = {"sliding_window": 7} if architecture == "MistralModel" else {}
    reference = write(tmp_path, architecture, is_causal=False, num_labels=1, **window)
    overrides: dict[str, Any] = {} if is_said else {"is_causal": None}
    for end in ("Model", "ForSequenceClassification"):
        if not is_said and architecture.endswith(end):
            overrides["architectures"] = [f"{architecture.removesuffix(end)}Bidirectional{end}"]
    prompts = random_prompts((5, 17, 33))
    limits = {"max_model_len": 40, "max_num_batched_tokens": 80}
    more = {"hf_overrides": overrides, "model_impl": "transformers"}
    with open_llm(tmp_path, **limits, **more) as llm:
        assert not llm.llm_engine.plan.settings.engine.enable_chunked_prefill
        results = results_of(llm, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        hidden = states_of(reference, prompt)
        true = hidden[-1] if is_said else hidden.mean(0)
        if architecture.endswith("Model"):
            true = normalized(true)
        else:
            true = reference.model.score(true).detach().sigmoid()
        assert (result - true).abs().max() < 1e-5


def test_an_encoder_of_unknown_name(tmp_path: Path) -> None:
    """The error says what to call it."""
    model, tokenizer = make(tmp_path, "Camembert")
    other: dict[str, Any] = {"architectures": ["OtherCamembertModel"]}
    with pytest.raises(ModelError, match="not causal, .*TransformersEncoderModel"):
        LLM(str(tmp_path), dtype="float32", hf_overrides=other)
    name = {"architectures": ["TransformersEncoderModel"]}
    with open_tiny(tmp_path, "Camembert", hf_overrides=name) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        true = normalized(states(model, tokenizer(text)["input_ids"])[0])
        assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "MobileBert": (
        {
            "embedding_size": 16,
            "intra_bottleneck_size": 32,
            "true_hidden_size": 32,
            "num_feedforward_networks": 1,
        },
        "MobileBertModel mixes the states of tokens",
    ),
    "Esm": (
        {"token_dropout": True, "mask_token_id": 5, "pad_token_id": 1},
        "does more with tokens than to look up their embeddings",
    ),
    "Albert": ({"embedding_size": 16}, "attends 3 times in 3 layers"),
    "MPNet": ({}, "MPNetModel computes attention .* of two tokens"),
    "JinaEmbeddingsV3": ({}, "is stored as .*Wqkv.weight, which cannot be converted"),
    "NomicBert": ({}, "is stored as .*Wqkv.weight, which cannot be converted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_encoders_that_cannot_be_served(name: str, tmp_path: Path) -> None:
    """MobileBert joins the embeddings of neighbors, which may be of another prompt. ESM scales
    embeddings by the number of masked tokens. ALBERT's layers are one."""
    values, message = REFUSED[name]
    kind = getattr(transformers, f"{name}Model")
    kind(kind.config_class(**{**SIZES, "vocab_size": VOCAB_SIZE, **values})).save_pretrained(
        tmp_path
    )
    write_tokenizer(tmp_path, is_roberta=False)
    architectures = {"architectures": ["TransformersEncoderModel"]}
    with pytest.raises(ModelError, match=message):
        LLM(str(tmp_path), dtype="float32", hf_overrides=architectures)


@pytest.mark.parametrize("name", ["DebertaV2Model", "DebertaV2ForSequenceClassification"])
def test_attention_that_cannot_be_replaced(name: str, tmp_path: Path) -> None:
    values = {**SIZES, "vocab_size": VOCAB_SIZE, "relative_attention": True}
    kind: Callable[..., Any] = getattr(transformers, name)
    kind(transformers.DebertaV2Config(**values)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, is_roberta=False)
    with pytest.raises(ModelError, match="DebertaV2Model computes attention .* of two tokens"):
        LLM(str(tmp_path), dtype="float32")


def test_heads_that_read_other_states(tmp_path: Path) -> None:
    """EuroBert's usual head computes classes of each token and takes their mean."""
    make(tmp_path, "EuroBert", "ForSequenceClassification", classifier_pooling="late")
    with pytest.raises(ModelError, match="classifier_pooling is 'late'; expected cls, bos or mean"):
        open_tiny(tmp_path, "EuroBert")
