"""The contract of the kind, and what the files of a checkpoint ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_pooler_sentence.plan import labels, plan
from pegboard_pooler_sentence.pooler import SentencePooler

from pegboard.data.pooling_params import Pooling, PoolingParams
from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.pooler import Pooler, PoolerFacts, PoolerSetup
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_pooler import PoolerContract, pool_step

NONE: frozenset[str] = frozenset()


def method(pooling_type: str, activation: str) -> dict[str, str]:
    return {"pooling_type": pooling_type, "activation": activation}


def test_contract() -> None:
    check_entry(installed_entry("pooler", "sentence"))


class TestVectors(PoolerContract):
    pooling = Pooling(dimensions=6, method=method("LAST", "normalize"))

    def pooler(self, setup: PoolerSetup) -> Pooler:
        return SentencePooler(None, setup)


class TestMean(TestVectors):
    pooling = Pooling(whole_prompts=True, method=method("MEAN", "none"))


class TestClasses(TestVectors):
    pooling = Pooling(task="classify", whole_prompts=True, method=method("CLS", "softmax"))


@pytest.mark.parametrize(
    ("pooling_type", "expected"),
    [("LAST", [[5.0, 6.0], [7.0, 8.0]]), ("CLS", [[1.0, 2.0], [7.0, 8.0]])]
    + [("MEAN", [[3.0, 4.0], [7.0, 8.0]])],
)
def test_the_state_of_a_prompt(pooling_type: str, expected: list[list[float]]) -> None:
    hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    pooler = SentencePooler(None, PoolerSetup(Pooling(method=method(pooling_type, "normalize"))))
    step = pool_step([3, 1], [PoolingParams(use_activation=False)] * 2)
    assert np.array(pooler.pool(hidden, step)()).tolist() == expected


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
    assert made == Pooling(method=method("LAST", "normalize"))
    made = plan(PoolerFacts(frozenset({"encoder"}), plain, {}))
    assert made.method["pooling_type"] == "CLS" and made.whole_prompts


def test_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    files = {
        "modules.json": modules("Transformer", "Pooling"),
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 4},
        "sentence_bert_config.json": {"max_seq_length": 77},
    }
    facts = PoolerFacts(NONE, write(tmp_path, files, {"is_matryoshka": True, "hidden_size": 4}), {})
    assert plan(facts) == Pooling(
        whole_prompts=True,
        max_length=77,
        use_activation=False,
        dimensions=4,
        method=method("MEAN", "normalize"),
    )


def test_the_setting_wins_over_the_files(tmp_path: Path) -> None:
    files = {"modules.json": modules("Transformer", "Normalize")}
    config = {"pooling_type": "CLS", "use_activation": False}
    made = plan(PoolerFacts(NONE, write(tmp_path, files, {}), config))
    assert made.method["pooling_type"] == "CLS" and not made.use_activation and made.whole_prompts
    for wrong in ({"pooling_type": "ALL"}, {"normalize": True}, {"use_activation": 3}):
        with pytest.raises(ConfigError, match="pooler_config"):
            plan(PoolerFacts(NONE, write(tmp_path, {}, {}), wrong))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"modules.json": modules("Transformer", "Dense")}, "'Dense' is not supported"),
        ({"modules.json": {}}, "a list of objects"),
        (
            {"modules.json": [{"type": "a.Pooling", "path": "../elsewhere"}]},
            "leaves the model's folder",
        ),
        (
            {
                "modules.json": modules("Pooling"),
                "0_Pooling/config.json": {"pooling_mode_max_tokens": True},
            },
            "the model pools by max_tokens",
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
