"""Gemma 3n, compared with transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pegboard.errors import ModelError
from pegboard.worker import worker
from pegboard.worker.loaded_model import LoadedModel

SIZES = {
    "num_hidden_layers": 7,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    + ["sliding_attention", "full_attention", "sliding_attention"],
    "head_dim": 8,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 6,
    "laurel_rank": 5,
    "vocab_size_per_layer_input": 100,
    "intermediate_size": [48, 32, 48, 48, 40, 48, 48],
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.3, 0.0, 0.0],
}
CASES: dict[str, dict[str, Any]] = {
    "all features": SIZES,
    "no shared layers": {
        **SIZES,
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 3,
        "altup_correct_scale": False,
    },
    "another stream": {**SIZES, "altup_active_idx": 2, "final_logit_softcapping": 2.0},
}


@pytest.mark.parametrize("name", CASES)
def test_cases(write: Any, check_parity: Any, check_recorded: Any, name: str) -> None:
    reference = write("gemma3n_text", **CASES[name])
    check_parity(reference)
    check_recorded(reference)


def test_it_is_not_divided(write: Any, open_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = write("gemma3n_text", **SIZES)

    def part(*given: Any, **more: Any) -> LoadedModel:
        return LoadedModel(*given, **{**more, "layers": range(3)})

    monkeypatch.setattr(worker, "LoadedModel", part)
    with pytest.raises(ModelError, match="cannot be divided or tapped"):
        open_llm(reference.directory)


def test_preemption_and_two_answers(write: Any, check_parity: Any, check_cached: Any) -> None:
    reference = write("gemma3n_text", **SIZES)
    check_parity(reference, lengths=(3, 20, 40, 33), num_gpu_blocks_override=60, max_model_len=56)
    check_cached(reference, (37, 30, 13))


def test_part_of_a_checkpoint_with_images(write: Any, check_parity: Any) -> None:
    """The published checkpoints have the text model's config and tensors under other names. Tensors
    of other parts, and of keys that shared layers do not use, stay unread."""
    reference = write("gemma3n_text", **SIZES)
    path = reference.directory / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path).items()
    }
    norm = tensors["model.language_model.layers.6.self_attn.q_norm.weight"]
    unused = {
        f"model.{name}.weight": norm.clone()
        for name in ("vision_tower.norm", "language_model.layers.6.self_attn.k_norm")
    }
    save_file(tensors | unused, path, {"format": "pt"})
    path = reference.directory / "config.json"
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    path.write_text(json.dumps({**config, "text_config": json.loads(path.read_text())}))
    check_parity(reference)
