"""The contract of the kind, and what the files of a checkpoint ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_pooler_sentence.classes import labels
from pegboard_pooler_sentence.plan import plan
from pegboard_pooler_sentence.pooler import SentencePooler
from safetensors.torch import save_file

from pegboard.data.pooling_params import Pooling, PoolingParams
from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.pooler import Pooler, PoolerFacts, PoolerSetup
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry, TokenizerPayload
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_pooler import PoolerContract, pool_step

NONE: frozenset[str] = frozenset()


def method(pooling_types: str, activation: str, **more: str) -> dict[str, str]:
    common = {"pooling_types": pooling_types, "token_pooling": "ALL", "activation": activation}
    return {**common, **more}


def test_contract() -> None:
    check_entry(installed_entry("pooler", "sentence"))


class TestVectors(PoolerContract):
    pooling = Pooling(dimensions=6, method=method("LAST", "normalize"))

    def pooler(self, setup: PoolerSetup) -> Pooler:
        return SentencePooler(None, setup)


class TestJoined(TestVectors):
    pooling = Pooling(
        tasks=("token_embed",), dimensions=6, method=method("MEAN,MAX,CLS,LAST,MEAN_SQRT", "none")
    )


class TestClasses(TestVectors):
    pooling = Pooling(task="classify", tasks=("token_classify",), method=method("CLS", "softmax"))


class TestTokens(TestVectors):
    pooling = Pooling(task="token_embed", dimensions=6, method=method("", "normalize"))


@pytest.mark.parametrize(
    ("pooling_type", "expected"),
    [
        ("LAST", [[5.0, 6.0], [7.0, 8.0]]),
        ("CLS", [[1.0, 2.0], [7.0, 8.0]]),
        ("MEAN", [[3.0, 4.0], [7.0, 8.0]]),
        ("MAX", [[5.0, 6.0], [7.0, 8.0]]),
        ("MEAN_SQRT", [[9 / 3**0.5, 12 / 3**0.5], [7.0, 8.0]]),
        ("CLS,MAX", [[1.0, 2.0, 5.0, 6.0], [7.0, 8.0, 7.0, 8.0]]),
    ],
)
def test_the_state_of_a_prompt(pooling_type: str, expected: list[list[float]]) -> None:
    hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    pooler = SentencePooler(None, PoolerSetup(Pooling(method=method(pooling_type, "normalize"))))
    step = pool_step([3, 1], [PoolingParams(use_activation=False)] * 2)
    np.testing.assert_allclose(pooler.pool(hidden, step)(), expected, rtol=1e-6)


def write(folder: Path, files: dict[str, Any], config: dict[str, Any]) -> Checkpoint:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return Checkpoint(
        format="safetensors",
        path=folder,
        config=config,
        architectures=("AcmeModel",),
        tensors={},
        tokenizer=TokenizerPayload("none"),
        digest="0",
    )


def modules(*names: str) -> list[dict[str, str]]:
    return [
        {"type": f"sentence_transformers.models.{name}", "path": f"{place}_{name}"}
        for place, name in enumerate(names)
    ]


def test_without_files_the_flags_decide(tmp_path: Path) -> None:
    plain = write(tmp_path, {}, {})
    made = plan(PoolerFacts(NONE, plain, {}))
    assert made == Pooling(
        tasks=("token_embed",),
        from_start=("token_embed",),
        head=(),
        method=method("LAST", "normalize"),
    )
    made = plan(PoolerFacts(frozenset({"encoder"}), plain, {}))
    assert made.method["pooling_types"] == "CLS" and made.whole_prompts and not made.from_start


def test_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    files = {
        "modules.json": modules("Transformer", "Pooling"),
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 4},
        "sentence_bert_config.json": {"max_seq_length": 77},
    }
    facts = PoolerFacts(NONE, write(tmp_path, files, {"is_matryoshka": True, "hidden_size": 4}), {})
    assert plan(facts) == Pooling(
        tasks=("token_embed",),
        from_start=("embed", "token_embed"),
        max_length=77,
        use_activation=False,
        dimensions=4,
        head=(),
        method=method("MEAN", "normalize"),
    )


def test_the_setting_wins_over_the_files(tmp_path: Path) -> None:
    files = {"modules.json": modules("Transformer", "Normalize")}
    config = {"pooling_type": "CLS", "use_activation": False}
    made = plan(PoolerFacts(NONE, write(tmp_path, files, {}), config))
    assert made.method["pooling_types"] == "CLS" and not made.use_activation
    assert made.from_start == ("embed", "token_embed")
    for wrong in (
        {"pooling_type": "SOME"},
        {"normalize": True},
        {"use_activation": 3},
        {"task": "classify"},
        {"logit_sigma": 0},
        {"logit_bias": 1, "logit_mean": 1},
        {"dimensions": 0},
        {"returned_token_ids": [0]},
    ):
        with pytest.raises(ConfigError, match="pooler_config"):
            plan(PoolerFacts(NONE, write(tmp_path, {}, {}), wrong))


@pytest.mark.parametrize(
    ("config", "task", "tokens"),
    [
        ({"pooling_type": "ALL"}, "token_embed", "ALL"),
        ({"pooling_type": "STEP", "step_tag_id": 3}, "token_embed", "STEP"),
        ({"seq_pooling_type": "MEAN", "tok_pooling_type": "STEP"}, "embed", "STEP"),
        ({"task": "token_embed"}, "token_embed", "ALL"),
    ],
)
def test_the_task_of_requests_that_name_none(
    tmp_path: Path, config: dict[str, Any], task: str, tokens: str
) -> None:
    made = plan(PoolerFacts(NONE, write(tmp_path, {}, {}), config))
    assert made.task == task and {made.task, *made.tasks} == {"embed", "token_embed"}
    assert made.has_steps == (tokens == "STEP") and made.method["token_pooling"] == tokens


def test_results_of_tokens_and_of_steps() -> None:
    """Of two prompts, the first of which comes in two steps. Rows of step tags, and some
    columns."""
    pooling = Pooling(
        task="token_classify",
        tasks=("classify",),
        has_steps=True,
        method=method("LAST", "none", token_pooling="STEP", step_tag_id="7"),
    )
    pooler = SentencePooler(None, PoolerSetup(pooling))
    hidden = torch.arange(24.0).reshape(4, 6)
    params = [PoolingParams(), PoolingParams(step_tag_id=1, returned_token_ids=(2, 0))]
    first = pool_step([2], params[:1], ends=[False], token_ids=[7, 5])
    assert pooler.pool(hidden[:2], first)() == []
    second = pool_step([1, 1], params, offsets=[2, 0], token_ids=[7, 1])
    one, other = pooler.pool(hidden[2:], second)()
    assert one.tolist() == [[3.0, 5.0, 7.0], [27.0, 29.0, 31.0]]
    assert other.tolist() == [[43.0, 39.0]]


def test_values_are_shifted_and_divided_before_the_activation() -> None:
    pooling = Pooling(
        task="classify", method=method("LAST", "sigmoid", logit_mean="3", logit_sigma="2")
    )
    pooler = SentencePooler(None, PoolerSetup(pooling))
    (values,) = pooler.pool(torch.arange(6.0)[None], pool_step([1]))()
    np.testing.assert_allclose(values, 1 / (1 + np.exp(-np.array([0.0, 1.0, 2.0]))), rtol=1e-6)


def test_steps_that_are_linear_layers(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(2, 6) / 10
    for place, (shape, activation) in enumerate(((weight, "Identity"), (torch.eye(2), "Tanh")), 2):
        (tmp_path / f"{place}_Dense").mkdir()
        tensors = {"linear.weight": shape, "linear.bias": torch.ones(2)}
        save_file(tensors, tmp_path / f"{place}_Dense" / "model.safetensors")
        config = {"activation_function": f"torch.nn.modules.activation.{activation}"}
        (tmp_path / f"{place}_Dense" / "config.json").write_text(json.dumps(config))
    files = {
        "modules.json": modules("Transformer", "Pooling", "Dense", "Dense"),
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
    }
    facts = PoolerFacts(NONE, write(tmp_path, files, {}), {})
    pooler = SentencePooler(None, PoolerSetup(plan(facts)))
    hidden = torch.rand(3, 6)
    (vector,) = pooler.pool(hidden, pool_step([3], [PoolingParams(use_activation=False)]))()
    true = torch.tanh(weight @ hidden[-1] + 2)
    np.testing.assert_allclose(vector, true, rtol=1e-5)
    files["modules.json"] = modules("Transformer", "Pooling", "Dense", "Pooling")
    for name, told in (("2_Dense/model.safetensors", "is missing"), ("", "must come once")):
        if name:
            (tmp_path / name).unlink()
        else:
            write(tmp_path, files, {})
        with pytest.raises(ModelError, match=told):
            plan(facts)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"modules.json": modules("Transformer", "LSTM")}, "'LSTM' is not supported"),
        (
            {
                "modules.json": modules("Dense"),
                "0_Dense/config.json": {"activation_function": "torch.nn.Tanhh"},
            },
            "'Tanhh' is not known",
        ),
        ({"modules.json": {}}, "a list of objects"),
        (
            {"modules.json": [{"type": "a.Pooling", "path": "../elsewhere"}]},
            "leaves the model's folder",
        ),
        (
            {
                "modules.json": modules("Pooling"),
                "0_Pooling/config.json": {"pooling_mode_weightedmean_tokens": True},
            },
            "the model pools by weightedmean_tokens",
        ),
    ],
)
def test_files_that_ask_for_something_else(
    tmp_path: Path, files: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        plan(PoolerFacts(NONE, write(tmp_path, files, {}), {}))


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"num_labels": 1}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Softmax"}}, "softmax"),
    ],
)
def test_the_activation_of_classes(tmp_path: Path, config: dict[str, Any], activation: str) -> None:
    made = plan(PoolerFacts(frozenset({"classifier"}), write(tmp_path, {}, config), {}))
    assert made.task == "classify" and made.method["activation"] == activation
    assert made.labels == labels(config) and made.dimensions is None


@pytest.mark.parametrize("listed", [3, ["4"], [True], {"a": 1}])
def test_dimensions_that_are_no_numbers(tmp_path: Path, listed: object) -> None:
    good = write(tmp_path, {}, {"matryoshka_dimensions": [2, 4]})
    assert plan(PoolerFacts(NONE, good, {})).dimensions == (2, 4)
    with pytest.raises(ModelError, match="matryoshka_dimensions"):
        plan(PoolerFacts(NONE, write(tmp_path, {}, {"matryoshka_dimensions": listed}), {}))


def test_names_of_classes() -> None:
    assert labels({"id2label": {"0": "no", "1": "yes"}}) == ("no", "yes")
    assert labels({}) == ("LABEL_0", "LABEL_1") and labels({"num_labels": 1}) == ("LABEL_0",)


def test_the_plan_needs_no_torch() -> None:
    code = "import sys, pegboard_pooler_sentence.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"returned_token_ids": [2]}, "the model has 2 classes"),
        ({"returned_token_ids": [-1]}, "the model has 2 classes"),
        ({"dimensions": 2}, "a model that makes vectors"),
    ],
)
def test_settings_that_do_not_fit_a_head_for_classes(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    entry = TensorEntry("score.weight", (2, 4), "float32", "model.safetensors", 0, 32)
    checkpoint = replace(write(tmp_path, {}, {}), tensors={"score.weight": entry})
    facts = PoolerFacts(NONE, checkpoint, {"pooling_type": "STEP", **config}, "classify")
    with pytest.raises(ConfigError, match=message):
        plan(facts)
    kept = plan(replace(facts, config={"pooling_type": "STEP", "returned_token_ids": [1]}))
    assert kept.head == ("score",) and kept.method["returned_token_ids"] == "[1]"


def test_prompts_and_long_texts(tmp_path: Path) -> None:
    name = "config_sentence_transformers.json"
    files = {name: {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}}
    config = {"enable_chunked_processing": True, "max_embed_len": 900}
    made = plan(PoolerFacts(NONE, write(tmp_path, files, {}), config))
    assert made.prompts == {"query": "q: ", "document": ""} and made.prompt_name == "query"
    assert made.max_embed_len == 900
    for wrong in ({"prompts": {"query": 3}}, {"prompts": [1]}, {"default_prompt_name": "query"}):
        with pytest.raises(ModelError, match=name):
            plan(PoolerFacts(NONE, write(tmp_path, {name: wrong}, {}), {}))
    for setting in ({"max_embed_len": 900}, {"enable_chunked_processing": True}):
        with pytest.raises(ConfigError, match="enable_chunked_processing needs max_embed_len"):
            plan(PoolerFacts(NONE, write(tmp_path, {name: {}}, {}), setting))


def test_prompts_that_a_mean_leaves_out(tmp_path: Path) -> None:
    """An error says how to count them. Without a prompt, nothing is left out, and the first token
    is always taken."""
    name = "config_sentence_transformers.json"
    folder = "1_Pooling/config.json"
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    files = {"modules.json": modules("Transformer", "Pooling"), folder: pooling}
    files |= {name: {"prompts": {"query": "q: "}}}
    checkpoint = write(tmp_path / "mean", files, {})
    with pytest.raises(ModelError, match=r"include_prompt=false.* set pooler_config to .*MEAN"):
        plan(PoolerFacts(NONE, checkpoint, {}))
    counted = plan(PoolerFacts(NONE, checkpoint, {"pooling_type": "MEAN"}))
    assert counted.prompts == {"query": "q: "} and counted.method["pooling_types"] == "MEAN"
    empty = {**files, name: {"prompts": {"query": ""}}}
    assert plan(PoolerFacts(NONE, write(tmp_path / "empty", empty, {}), {})).task == "embed"
    first = {**files, folder: {"pooling_mode_cls_token": True, "include_prompt": False}}
    assert plan(PoolerFacts(NONE, write(tmp_path / "first", first, {}), {})).task == "embed"


class TestWords(TestVectors):
    pooling = Pooling(dimensions=6, method=method("MAX", "none", words="relu"))


@pytest.mark.parametrize("how", ["MAX", "SUM"])
def test_words_of_long_prompts(how: str) -> None:
    """A prompt is longer than the logits that are computed at once. Others end in the middle."""
    lengths = [200, 600, 3, 1]
    hidden = torch.randn(sum(lengths), 4, generator=torch.Generator().manual_seed(1))
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    pooler = SentencePooler(None, PoolerSetup(Pooling(method=method(how, "none", words="relu"))))
    step = replace(pool_step(lengths, [PoolingParams()] * 4), classify=lambda rows: rows @ table.T)
    for vector, rows in zip(pooler.pool(hidden, step)(), hidden.split(lengths), strict=True):
        values = (rows @ table.T).relu().log1p()
        true = values.amax(0) if how == "MAX" else values.sum(0)
        np.testing.assert_allclose(vector, true, rtol=1e-4, atol=1e-5)


def test_instructions_are_found_by_their_text(tmp_path: Path) -> None:
    """Also where a token has the end of the mark and more."""
    grit = write(tmp_path, {}, {"architectures": ["GritLM"]})
    pooling = plan(PoolerFacts(NONE, grit, {"use_activation": False}, "embed"))
    assert pooling.whole_prompts and pooling.sees_all and pooling.method["instructed"] == "yes"
    texts = [b"", b" <|user|>\n", b"find", b"\n<|emb", b"ed|>", b"\n", b"\n\n", b"fjord"]
    vocabulary = Vocabulary(texts, frozenset({0}), (), 0)
    pooler = SentencePooler(None, PoolerSetup(pooling, vocabulary=lambda: vocabulary))
    prompts = [
        ([0, 1, 2, 3, 4, 5, 7, 2], 6),
        ([0, 1, 2, 3, 4, 6, 7, 7], 6),
        ([0, 1, 2, 7], 1),
        ([0, 99], 1),
        ([1, 3, 4, 5, 7], 0),
    ]
    ids = [token_id for prompt, _ in prompts for token_id in prompt]
    hidden = torch.randn(len(ids) + 6, 3)
    step = pool_step(
        [*(len(prompt) for prompt, _ in prompts), 6], token_ids=[*ids, 0, 1, 3, 4, 5, 5]
    )
    results = pooler.pool(hidden, replace(step, params=[PoolingParams(use_activation=False)] * 6))()
    for result, (_, left_out), start, stop in zip(
        results, prompts, step.starts, step.starts[1:], strict=False
    ):
        np.testing.assert_allclose(result, hidden[start + left_out : stop].mean(0), rtol=1e-5)
    np.testing.assert_allclose(results[-1], hidden[-1], rtol=1e-5)
    step = pool_step([6], token_ids=[0, 1, 2, 3, 4, 5])
    assert not np.any(pooler.pool(hidden[:6], step)()[0])  # nothing is left
    with pytest.raises(ModelError, match="instructions are found by their text"):
        SentencePooler(None, PoolerSetup(pooling))
