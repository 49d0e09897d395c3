"""Checkpoints of mixtures of experts in the common formats, with the names of tensors that the
models have on Hugging Face. Their logits and tokens are those of the model with the dequantized
weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_layouts import CASES, FLOATS, quantize, stack_experts
from tiny_models import DIVIDED, divide

from pegboard import LLM, SamplingParams
from pegboard.plugins.discovery import scan_path

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
QWEN = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
    ),
}
WITH_ALL = ("awq", "gptq", "fp8 in blocks")
"""Formats that are tried with all models; the others only with Qwen3."""
ALIKE = {
    "gptq with 8 bits",
    "gptq with 3 bits",
    "gptq with 2 bits",
    "auto-round",
    "pack-quantized in act order",
    "fp_quant",
    "awq next to plain parts",
    "modelopt awq",
    "float-quantized",
}
"""Formats whose tensors have the names of another case. `test_stored_formats` has them."""
PROMPT = [7, 30, 101, 12, 5, 88, 64, 3]
NUM_TOKENS = 12

UNDIVIDED = {
    "gptq in act order",
    "int-quantized, turned",
    "int-quantized, turned with signs",
}
"""Formats of which ranks cannot divide other layers."""


@pytest.fixture
def check_tokens(
    open_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any, str], None]:
    """check_tokens(reference, case): the logprobs and the greedy tokens are those of the model with
    the dequantized weights. The CPU kernels, which round activations, are left out for integers,
    because a router may choose another expert after rounding."""

    def check(reference: Any, case: str) -> None:
        params = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0, logprobs=-1, ignore_eos=True, detokenize=False
        )
        if case not in FLOATS:
            names = {entry.distribution for entry in scan_path(sys.path).entries} - {
                "pegboard-kernel-cpu"
            }
            monkeypatch.setenv("PEGBOARD_PLUGINS", ",".join(sorted(names)))
        with open_llm(reference.directory, download_dir=str(tmp_path / "cache")) as llm:
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        expected = reference.logprobs([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
        found = torch.tensor(
            [
                [row[token].logprob for token in sorted(row)]
                for row in output.outputs[0].logprobs or []
            ]
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert tokens == expected.argmax(1).tolist()

    return check


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "case"),
    [
        *(("qwen3_moe", case) for case in CASES if case not in ALIKE),
        *((model, case) for model in MODELS for case in WITH_ALL if model != "qwen3_moe"),
    ],
)
def test_experts_of_their_own(
    write: Callable[..., Any], check_tokens: Callable[[Any, str], None], model: str, case: str
) -> None:
    """Routers are plain in these checkpoints, and the gates of shared experts, whether or not the
    config says it."""
    model_type, config = MODELS[model]
    reference = write(model_type, **config)
    quantize(reference, case)
    check_tokens(reference, case)


@pytest.mark.parametrize("case", ["fp8 in blocks", "mxfp4", "float-quantized", "int-quantized"])
def test_one_tensor_for_all_experts(
    write: Callable[..., Any], check_tokens: Callable[[Any, str], None], case: str
) -> None:
    model_type, config = MODELS["qwen3_moe"]
    reference = write(model_type, **config)
    quantize(reference, case)
    stack_experts(reference)
    check_tokens(reference, case)


MOVING = {
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"step_interval": 2, "window_size": 3, "num_redundant_experts": 2},
}


@pytest.mark.sampled(4)
@pytest.mark.one_rank
@pytest.mark.parametrize("case", [case for case in CASES if case not in ALIKE | UNDIVIDED])
def test_experts_that_move_between_ranks(
    write: Callable[..., Any],
    check_tokens: Callable[[Any, str], None],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    """Every second step, on two ranks."""
    divide(monkeypatch, 2)
    for name, value in MOVING.items():
        monkeypatch.setitem(DIVIDED, name, value)
    model_type, config = MODELS["qwen3_moe"]
    reference = write(model_type, **config)
    quantize(reference, case)
    check_tokens(reference, case)
