"""`pegboard check MODEL`: a verdict with its reasons, without an engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard.cli import check_command
from pegboard.cli.main import main
from pegboard.config.schema import EngineConfig, Settings
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry, TokenizerPayload

CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
"""3 layers × (keys and values) × 2 heads of 8 numbers: 96 numbers per token."""


def memory(config: dict[str, Any], free: int, defaults: dict[str, Any], **engine: Any) -> dict[str, str]:
    tensors = {"w": TensorEntry("w", (1024,), "float32", "f", 0, 4096)}
    payload = TokenizerPayload("hf")
    checkpoint = Checkpoint(format="x", path=Path(), config=config, architectures=(), tensors=tensors, tokenizer=payload)
    plan = SimpleNamespace(settings=Settings(engine=EngineConfig(**engine)), checkpoint=checkpoint, max_model_len=500)
    return check_command._memory(plan, defaults, free)  # type: ignore[arg-type]


def test_the_context_is_limited_by_the_kv_cache_and_by_the_model() -> None:
    facts = memory(CONFIG, 10**6, {"dtype": "bfloat16", "kv_cache_memory_bytes": 192 * 100})
    assert facts["context"] == "100 tokens fit in the KV cache; the model's limit is 500"
    assert "runs" not in facts
    whole = memory(CONFIG, 10**6, {"dtype": "bfloat16"})
    assert whole["context"].startswith("500 tokens"), "the KV cache gets what the weights leave"
    assert memory(CONFIG, 10**6, {"dtype": "bfloat16"}, dtype="float32", kv_cache_memory_bytes=384 * 7)["context"][0] == "7"


def test_weights_that_do_not_fit_do_not_run() -> None:
    facts = memory(CONFIG, 4000, {})
    assert facts["runs"] == "no" and facts["why"] == "the weights take 4.0 KiB, and 3.9 KiB are free"


@pytest.mark.parametrize("config", [{}, {**CONFIG, "num_attention_heads": 0}, {**CONFIG, "hidden_size": "big"}])
def test_a_config_without_sizes_gives_no_estimate(config: dict[str, Any]) -> None:
    assert "context" not in memory(config, 10**6, {})


def test_the_text_part_of_a_config_counts() -> None:
    assert memory({"text_config": CONFIG}, 10**6, {}) == memory(CONFIG, 10**6, {})


def test_what_does_not_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "nothing")
    assert main(["check", missing, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["runs"] == "no" and "nothing" in facts["why"]
    assert main(["check", missing]) == 1
    assert capsys.readouterr().out.startswith("runs      no\nwhy       ")


@pytest.mark.real_model
def test_the_default_model_runs_and_torch_is_not_needed_to_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    before = "torch" in sys.modules
    assert main(["check"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("runs      yes\nmodel     ") and "8,192 tokens fit" in shown and "pegboard-pack-gguf" in shown
    assert ("torch" in sys.modules) == before
