"""Scales of a KV cache of 8-bit floats. The model has keys and values of up to 2,000, which need
scales. Its queries and output projections are as much smaller, so it has the logits of the model
with small keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pegboard import LLM, SamplingParams
from pegboard.errors import PegboardError

PROMPTS = [[7, 30, 101, 12, 5], list(range(3, 60))]
PARAMS = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
LARGER = 250.0
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
PLAIN = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}


def write_large(
    reference: Any, scales: dict[str, Any], config: dict[str, Any] | None = None
) -> None:
    """Make keys and values LARGER times as large, and store these scales in every layer (name below
    self_attn → number)."""
    tensors = load_file(reference.directory / "model.safetensors")
    for name in tensors:
        for part, factor in (
            ("q_proj", 1 / LARGER),
            ("k_proj", LARGER),
            ("v_proj", LARGER),
            ("o_proj", 1 / LARGER),
        ):
            if f".{part}." in name:
                tensors[name] = tensors[name] * factor
    for layer in range(reference.model.config.num_hidden_layers):
        for name, number in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(number)
    save_file(tensors, reference.directory / "model.safetensors", {"format": "pt"})
    if config is not None:
        file = reference.directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


def error_of(llm: LLM, reference: Any) -> float:
    """The standard deviation of the errors of all logits, relative to that of the logits."""
    expected = torch.cat([reference.logprobs(prompt)[:-1] for prompt in PROMPTS])
    rows = []
    for output in llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False
    ):
        for row in (output.prompt_logprobs or [])[1:]:
            assert row is not None
            rows.append([row[token].logprob for token in sorted(row)])
    return ((torch.tensor(rows) - expected).std() / expected.std()).item()


@pytest.fixture(params=["cpu_native", "cpu_paged"])
def open_on(request: pytest.FixtureRequest, open_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    return lambda directory, **settings: open_llm(
        directory, attention_backend=request.param, block_size=16, **settings
    )


def test_scales_of_the_checkpoint(write: Callable[..., Any], open_on: Callable[..., LLM]) -> None:
    reference = write("llama")
    write_large(reference, {"k_proj.k_scale": 8.0, "v_proj.v_scale": 10.0})
    with open_on(reference.directory, kv_cache_dtype="fp8") as llm:
        scaled = error_of(llm, reference)
    write_large(write("llama"), {})
    with open_on(reference.directory, kv_cache_dtype="fp8") as llm:
        saturated = error_of(llm, reference)
    with open_on(reference.directory, kv_cache_dtype="fp8", calculate_kv_scales=True) as llm:
        calculated = error_of(llm, reference)
    assert scaled < 0.15 and calculated < 0.15 and saturated > 4 * max(scaled, calculated), (
        scaled,
        calculated,
        saturated,
    )


PER_HEAD = {"k_scale": [[[8.0]], [[16.0]]], "v_scale": [[[6.0]], [[12.0]]]}


@pytest.mark.parametrize(
    ("strategy", "scales"),
    [("tensor", {"k_scale": [8.0], "v_scale": [8.0]}), ("attn_head", PER_HEAD)],
    ids=["tensor", "heads"],
)
def test_auto_is_what_the_checkpoint_asks_for(
    write: Callable[..., Any],
    open_on: Callable[..., LLM],
    caplog: pytest.LogCaptureFixture,
    strategy: str,
    scales: Any,
) -> None:
    caplog.set_level("INFO", "pegboard")
    reference = write("llama")
    write_large(reference, scales, {**PLAIN, "kv_cache_scheme": {**SCHEME, "strategy": strategy}})
    with open_on(reference.directory) as llm:
        assert error_of(llm, reference) < 0.15
    assert "stored in float8_e4m3fn" in caplog.text


def test_the_identity_of_blocks_depends_on_the_scales(
    write: Callable[..., Any], open_on: Callable[..., LLM]
) -> None:
    """Blocks with other scales are never taken for one's own, in the prefix cache or by a KV
    connector."""
    directory = write("llama").directory

    def identity(**settings: Any) -> str:
        with open_on(directory, kv_cache_dtype="fp8", **settings) as llm:
            return llm.llm_engine.engine._live.kv.plan.identity

    plain = identity()
    calculated = identity(calculate_kv_scales=True)
    assert identity(calculate_kv_scales=True) == calculated != plain == identity()


def test_calculated_scales_of_another_cache_have_no_effect(
    write: Callable[..., Any], open_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(
        write("llama").directory, block_size=16, kv_cache_dtype="int8", calculate_kv_scales=True
    ):
        assert "calculate_kv_scales has no effect" in caplog.text


@pytest.mark.parametrize(
    "name", ["nvfp4", "turboquant_k8v4", "int4_per_token_head", "fp8_per_token_head"]
)
def test_types_of_vllm_that_no_backend_stores_are_refused(
    write: Any, open_llm: Any, name: str
) -> None:
    """The error lists what each attention backend stores."""
    with pytest.raises(
        PegboardError,
        match=rf"kv_dtype '{name}' not in \{{bfloat16, float16, float32, float8_e4m3fn, .*int8",
    ):
        open_llm(write("llama").directory, kv_cache_dtype=name)
