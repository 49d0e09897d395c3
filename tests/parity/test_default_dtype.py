"""Models at the type that their checkpoints name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from stored_layouts import quantize
from test_dense_parity import ARCHITECTURES as DENSE
from test_dense_parity import halve_biases
from test_experts_parity import ARCHITECTURES as EXPERTS
from test_fallback_parity import ARCHITECTURES as FALLBACK
from test_latent_parity import ARCHITECTURES as LATENT
from test_llama_parity import ARCHITECTURES as LLAMA
from test_state_parity import ARCHITECTURES as STATES

from pegboard import SamplingParams

OWN = {**LLAMA, **DENSE, **EXPERTS, **LATENT, **STATES}
MODELS = [*((name, True) for name in OWN), *((name, False) for name in FALLBACK)]
"""(name, whether the model has code of its own; otherwise transformers' modules run)"""
PROMPT = list(range(3, 40))
NEVER_SPARSE = {"deepseek_v32": {"index_topk": 64}}
"""When inputs are rounded, an index may choose other tokens, so here it chooses all."""


def prompt_logprobs(llm: Any) -> torch.Tensor:
    """[positions of PROMPT but the first, V]"""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    rows = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].prompt_logprobs[
        1:
    ]
    return torch.tensor([[row[token].logprob for token in sorted(row)] for row in rows])


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "own"), MODELS)
def test_bfloat16_is_as_precise_as_in_transformers(
    write: Any,
    open_llm: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    own: bool,
) -> None:
    """Both compute in bfloat16 and are compared with float32 on the same weights. A router may
    choose other experts when its inputs are rounded, so the error of the median position counts.
    Own models are recorded, if the channels of their heads are a multiple of 8."""
    model_type, config = (OWN if own else FALLBACK)[name]
    fallback = {"hf_overrides": {"architectures": ["UnheardOfForCausalLM"]}}
    more = {"block_size": 16, "mamba_block_size": 16} if own else fallback
    reference = write(model_type, **{**config, **NEVER_SPARSE.get(name, {})})
    halve_biases(config, monkeypatch)
    rounded = reference.model.to(torch.bfloat16)
    rounded.save_pretrained(reference.directory)
    theirs = reference.logprobs(PROMPT)[:-1]
    exact = type(reference)(reference.directory, rounded.float()).logprobs(PROMPT)[:-1]
    caplog.set_level("INFO", "pegboard")
    with open_llm(reference.directory, dtype="auto", **more) as llm:
        ours = prompt_logprobs(llm)
    assert "computes with weights of bfloat16" in caplog.text
    is_native = own and "odd head size" not in name
    assert is_native == ("not replayed" not in caplog.text)
    found, allowed = ((one - exact).abs().mean(-1).median().item() for one in (ours, theirs))
    assert found < 2 * allowed + 0.01, f"off by {found}, transformers by {allowed}"


@pytest.mark.parametrize("quantization", [None, "gptq"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_type_of_a_checkpoint_is_kept(
    write: Any,
    open_llm: Any,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    quantization: str | None,
) -> None:
    """Weights and KV cache have it, quantized checkpoints' too, and steps are replayed. On a CPU,
    everything in between is float32, so the error is that of the KV cache, and of products that
    round to bfloat16, or, if they are quantized, to 8 bits."""
    reference = write("llama", hidden_size=64, intermediate_size=96)
    if quantization is None:
        reference.model.to(getattr(torch, dtype)).save_pretrained(reference.directory)
    else:
        quantize(reference, quantization)
    config = reference.directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}))
    with open_llm(reference.directory, dtype="float32", block_size=16) as llm:
        exact = prompt_logprobs(llm)
    caplog.set_level("INFO", "pegboard")
    with open_llm(reference.directory, dtype="auto", block_size=16) as llm:
        logprobs = prompt_logprobs(llm)
    assert f"computes with weights of {dtype}" in caplog.text
    assert f"stored in {dtype}" in caplog.text and "eagerly" not in caplog.text
    limit = 0.06 if quantization else {"bfloat16": 0.03, "float16": 0.003}[dtype]
    assert 0 < (logprobs - exact).abs().mean() < limit
