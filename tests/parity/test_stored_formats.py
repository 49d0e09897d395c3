"""Checkpoints of the common formats, written tensor by tensor as the formats define them, give the
logits of the model with the dequantized weights, up to the rounding of activations in kernels that
multiply integers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_layouts import CASES, FLOATS, LINEAR, as_float8, quantize
from test_state_parity import ARCHITECTURES as STATES

from pegboard import LLM, SamplingParams

PROMPTS = [[7, 30, 101, 12, 5], list(range(3, 60))]
PARAMS = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
OTHER_NAMES = {
    "gptq with 8 bits": "gptq_marlin",
    "modelopt_fp4": "modelopt_fp4",
    "awq": "moe_wna16",
}
"""Formats that are asked for under another name that reads them."""


def check_logits(llm: LLM, reference: Any, limit: float) -> None:
    """limit: of the standard deviation of the errors, relative to that of the logits."""
    expected = torch.cat([reference.logprobs(prompt)[:-1] for prompt in PROMPTS])
    rows = []
    for output in llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False
    ):
        for row in (output.prompt_logprobs or [])[1:]:
            assert row is not None
            rows.append([row[token].logprob for token in sorted(row)])
    off = ((torch.tensor(rows) - expected).std() / expected.std()).item()
    assert off < limit


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("architecture", "case"),
    [("olmo2", "awq"), ("olmo2", "gptq in act order"), *(("llama", case) for case in CASES)],
)
def test_the_logits_of_the_dequantized_model(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    architecture: str,
    case: str,
) -> None:
    """The forward is recorded, if this machine compiles kernels."""
    caplog.set_level("INFO", "pegboard")
    reference = write(architecture, **SIZES)
    quantize(reference, case)
    with open_llm(
        reference.directory,
        download_dir=str(tmp_path / "cache"),
        quantization=OTHER_NAMES.get(case),
        block_size=16,
    ) as llm:
        check_logits(llm, reference, 1e-4 if case in FLOATS else 0.05)
    assert "eagerly" not in caplog.text and "not replayed" not in caplog.text


STATES_IN = (
    ("mamba", "gptq"),
    ("mamba2", "int-quantized"),
    ("jamba", "gptq in act order"),
    ("bamba", "fp8"),
    ("falcon_h1", "pack-quantized"),
    ("nemotron_h", "pack-quantized"),
    ("lfm2", "awq"),
    ("qwen3_next", "gptq"),
    ("qwen3_next", "fp8 in blocks"),
    ("minimax", "awq"),
)
WIDE = {"hidden_size": 64, "tie_word_embeddings": False}
HEADS = {"mamba2": {"num_heads": 16}, "bamba": {"mamba_n_heads": 16}}
SCANNED = (*LINEAR, "in_proj", "out_proj", "in_proj_qkvz")
"""The ends of names of layers around states, beside those of others."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("architecture", "case"), STATES_IN)
def test_models_with_states(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    architecture: str,
    case: str,
) -> None:
    """Without kernels, nothing rounds activations. With them, an activation that is rounded may
    choose other experts, and scans add up the errors."""
    model_type, config = STATES[architecture]
    sizes = {"moe_intermediate_size": 32, "intermediate_size": 96}
    chosen = {name: size for name, size in sizes.items() if config.get(name, size) is not None}
    heads = HEADS.get(architecture, {})
    reference = write(model_type, **{**config, **WIDE, **chosen, **heads})
    quantize(reference, case, linear=SCANNED)
    settings: dict[str, Any] = {"download_dir": str(tmp_path / "cache"), "mamba_block_size": 8}
    with open_llm(reference.directory, **settings, plugins_deny=["pegboard-kernel-cpu"]) as llm:
        check_logits(llm, reference, 1e-3)
    with open_llm(reference.directory, **settings) as llm:
        check_logits(llm, reference, 1e-3 if case in FLOATS else 0.4)


def test_a_plain_checkpoint_is_rounded_to_nf4(
    write: Callable[..., Any], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """The values of nf4 are those of bitsandbytes."""
    positive = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    table = torch.tensor(
        [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, *positive]
    )
    reference = write("llama", **SIZES)
    for name, module in reference.model.named_modules():
        if name.endswith(LINEAR):
            blocks = module.weight.data.reshape(-1, 64)
            most = blocks.abs().amax(1, keepdim=True)
            codes = ((blocks / most).unsqueeze(-1) - table).abs().argmin(-1)
            module.weight.data.copy_((table[codes] * most).view(module.weight.shape))
    with open_llm(
        reference.directory, download_dir=str(tmp_path / "cache"), quantization="bitsandbytes"
    ) as llm:
        check_logits(llm, reference, 0.02)


def test_a_plain_checkpoint_is_rounded_to_fp8(
    write: Callable[..., Any], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    reference = write("llama", **SIZES)
    for name, module in reference.model.named_modules():
        if name.endswith(LINEAR):
            module.weight.data.copy_(as_float8(module.weight.data, 8, False)[1])
    with open_llm(
        reference.directory, download_dir=str(tmp_path / "cache"), quantization="fp8"
    ) as llm:
        check_logits(llm, reference, 1e-4)
