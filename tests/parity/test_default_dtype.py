"""Models at the type that their checkpoints name, on a CPU that multiplies bfloat16 in hardware
(this one may emulate it)."""

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
from pegboard.config.sources import engine_settings
from pegboard.engine.platform_defaults import with_platform_defaults
from pegboard.plan.engine_plan import resolve

OWN = {**LLAMA, **DENSE, **EXPERTS, **LATENT, **STATES}
MODELS = [*((name, True) for name in OWN), *((name, False) for name in FALLBACK)]
"""(name, whether the model has code of its own; otherwise transformers' modules run)"""
PROMPT = list(range(3, 40))
NEVER_SPARSE = {"deepseek_v32": {"index_topk": 64}}
"""When inputs are rounded, an index may choose other tokens, so here it chooses all."""


@pytest.fixture(autouse=True)
def native_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegboard_platform_cpu.platform.multiplies_bfloat16", lambda: True)


def prompt_logprobs(llm: Any) -> torch.Tensor:
    """[positions of PROMPT but the first, V]"""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    rows = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].prompt_logprobs[
        1:
    ]
    return torch.tensor([[row[token].logprob for token in sorted(row)] for row in rows])


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
    choose other experts when its inputs are rounded, so the error of the median position counts."""
    model_type, config = (OWN if own else FALLBACK)[name]
    more = {} if own else {"hf_overrides": {"architectures": ["UnheardOfForCausalLM"]}}
    reference = write(model_type, **{**config, **NEVER_SPARSE.get(name, {})})
    halve_biases(config, monkeypatch)
    rounded = reference.model.to(torch.bfloat16)
    rounded.save_pretrained(reference.directory)
    theirs = reference.logprobs(PROMPT)[:-1]
    exact = type(reference)(reference.directory, rounded.float()).logprobs(PROMPT)[:-1]
    caplog.set_level("INFO", "pegboard")
    with open_llm(reference.directory, dtype="auto", **more) as llm:
        ours = prompt_logprobs(llm)
    assert "computes in bfloat16" in caplog.text
    found, allowed = ((one - exact).abs().mean(-1).median().item() for one in (ours, theirs))
    assert found < 2 * allowed + 0.01, f"off by {found}, transformers by {allowed}"


def test_packed_weights_take_the_type_of_their_kernels(write: Any) -> None:
    """The reason is in the decision of the platform. Weights that are quantized while they are
    loaded are packed too."""
    reference = write("llama", hidden_size=64, intermediate_size=96)
    config = reference.directory / "config.json"
    for is_packed, settings, dtype in (
        (False, {}, "bfloat16"),
        (False, {"quantization": "rtn"}, "float32"),
        (True, {}, "float32"),
        (True, {"dtype": "bfloat16"}, "bfloat16"),
    ):
        if is_packed and "quantization_config" not in config.read_text():
            quantize(reference, "gptq")
        config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
        plan, registry = resolve(
            engine_settings(str(reference.directory), {"skip_tokenizer_init": True, **settings})
        )
        assert with_platform_defaults(registry, plan).dtype == dtype
        notes = registry.decisions["platform", ""].notes
        assert bool(notes) == (dtype == "float32")
        assert (
            not notes
            or "float32 instead of bfloat16: the kernels for packed weights take float32"
            in notes[0]
        )
