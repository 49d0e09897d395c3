"""Plain checkpoints that are quantized at load stay close to the original, and later starts give
the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import LLM, SamplingParams
from pegboard.errors import ConfigError

PROMPTS = [[7, 30, 101, 12, 5], list(range(3, 60))]
PARAMS = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
SIZES = {"hidden_size": 64, "intermediate_size": 80}
"""Heads and attention are whole blocks of 32 columns. The last matrix of the feed-forward block is
not, and stays plain."""


def logprobs(llm: LLM) -> torch.Tensor:
    """[positions of all prompts, V]"""
    rows = []
    for output in llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False
    ):
        for row in (output.prompt_logprobs or [])[1:]:
            assert row is not None
            rows.append([row[token].logprob for token in sorted(row)])
    return torch.tensor(rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("method", "options", "limit"),
    [
        ("rtn_int8", {}, 0.15),
        ("w8a8_int8", {}, 0.15),
        ("rtn", {}, 0.15),
        ("rtn_int4", {}, 0.8),
        ("rtn", {"bits": 4}, 0.8),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_close_to_the_floats(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    method: str,
    options: dict[str, Any],
    limit: float,
    tied: bool,
) -> None:
    reference = write("llama", tie_word_embeddings=tied, **SIZES)
    expected = torch.cat([reference.logprobs(prompt)[:-1] for prompt in PROMPTS])
    settings = {
        "quantization": method,
        "plugin_options": {f"quantization.{method}": options},
        "download_dir": str(tmp_path),
    }
    with open_llm(reference.directory, **settings) as llm:
        found = logprobs(llm)
    with open_llm(reference.directory, **settings) as llm:
        again = logprobs(llm)
    off = ((found - expected).std() / expected.std()).item()
    assert limit / 20 < off < limit, "not quantized" if off < limit else "too far off"
    assert torch.equal(found, again), "a warm start computes something else"


def test_the_repack_cache_can_be_turned_off(
    write: Callable[..., Any], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    with open_llm(
        write("llama", **SIZES).directory,
        quantization="rtn",
        repack_cache_gb=0,
        download_dir=str(folder),
    ) as llm:
        logprobs(llm)
    assert not folder.exists()


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "hqq"])
def test_methods_that_only_read_are_refused_for_plain_weights(
    write: Callable[..., Any], open_llm: Callable[..., LLM], method: str
) -> None:
    with pytest.raises(ConfigError, match=f"{method}.*has plain weights; .*at start: .*rtn"):
        open_llm(write("llama").directory, quantization=method)


def routers(model: Any) -> dict[str, torch.Tensor]:
    return {
        layer.build.path: layer.method.dequantize()
        for layer in model.modules()
        if getattr(layer, "is_router", False)
    }


@pytest.mark.parametrize("method", ["rtn", "tpu_int8", "fp8", "bitsandbytes"])
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        (
            "qwen3_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "head_dim": 16,
            },
        ),
        ("mixtral", {"num_local_experts": 4}),
        ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    ],
    ids=["qwen3_moe", "mixtral", "minimax_m2"],
)
@pytest.mark.one_rank
def test_routers_are_not_quantized(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    method: str,
    model_type: str,
    config: dict[str, Any],
) -> None:
    reference = write(model_type, **{**SIZES, "intermediate_size": 64, **config})
    with open_llm(
        reference.directory, quantization=method, download_dir=str(tmp_path / "cache")
    ) as llm:
        (found,) = llm.apply_model(routers)
    own = [
        tensor
        for name, tensor in reference.model.named_parameters()
        if name.endswith(("gate.weight", "router.weight"))
    ]
    assert len(found) == len(own) == 3
    assert all(
        torch.equal(weight, expected) for weight, expected in zip(found.values(), own, strict=True)
    )
