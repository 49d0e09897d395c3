"""Models at the type that their checkpoints name, on a CPU that multiplies bfloat16 in hardware (this one may emulate it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_dense_parity import ARCHITECTURES as DENSE
from test_dense_parity import halve_biases
from test_experts_parity import ARCHITECTURES as EXPERTS
from test_fallback_parity import ARCHITECTURES as FALLBACK
from test_latent_parity import ARCHITECTURES as LATENT
from test_llama_parity import ARCHITECTURES as LLAMA
from test_state_parity import ARCHITECTURES as STATES

from pegboard import SamplingParams
from pegboard.interfaces.platform import PlatformSetup

OWN = {**LLAMA, **DENSE, **EXPERTS, **LATENT, **STATES}
MODELS = [*((name, True) for name in OWN), *((name, False) for name in FALLBACK)]
"""(name, whether the model has code of its own; otherwise transformers' modules run)"""
PROMPT = list(range(3, 40))


@pytest.fixture(autouse=True)
def native_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard_platform_cpu.platform.multiplies_bfloat16", lambda: True)


def prompt_logprobs(llm: Any) -> torch.Tensor:
    """[positions of PROMPT but the first, V]"""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    rows = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].prompt_logprobs[1:]
    return torch.tensor([[row[token].logprob for token in sorted(row)] for row in rows])


@pytest.mark.parametrize(("name", "own"), MODELS)
def test_bfloat16_is_as_precise_as_in_transformers(
    write: Any, open_llm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, own: bool
) -> None:
    """Both compute in bfloat16 and are compared with float32 on the same weights. A router may choose other experts when its
    inputs are rounded, so the mean error counts, and not that of the worst position."""
    model_type, config = (OWN if own else FALLBACK)[name]
    more = {} if own else {"hf_overrides": {"architectures": ["UnheardOfForCausalLM"]}}
    reference = write(model_type, **config)
    halve_biases(config, monkeypatch)
    rounded = reference.model.to(torch.bfloat16)
    rounded.save_pretrained(reference.directory)
    theirs = reference.logprobs(PROMPT)[:-1]
    exact = type(reference)(reference.directory, rounded.float()).logprobs(PROMPT)[:-1]
    caplog.set_level("INFO", "pegboard")
    with open_llm(reference.directory, dtype="auto", **more) as llm:
        ours = prompt_logprobs(llm)
    assert "computes in bfloat16" in caplog.text
    found, allowed = (ours - exact).abs().mean().item(), (theirs - exact).abs().mean().item()
    assert found < 2 * allowed + 0.01, f"off by {found}, transformers by {allowed}"
