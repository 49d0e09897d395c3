"""Adapters over quantized base models: the results are those of the dequantized weights plus
scaling · B A, up to the rounding of activations in kernels that multiply integers. Requests with
and without the adapter share a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from stored_layouts import FLOATS, quantize
from test_adapters_parity import SCALING, Weights, merged, random_adapter
from test_gguf_parity import CASES as GGUF_CASES
from test_gguf_parity import convert
from test_ranks import HEADS
from test_stored_formats import SIZES

from pegboard import LLM, LoRARequest, SamplingParams

RANK = 4
PARAMS = SamplingParams(
    max_tokens=6, temperature=0, prompt_logprobs=-1, logprobs=-1, ignore_eos=True, detokenize=False
)
PROMPTS = [[7, 30, 101, 12, 5], list(range(3, 40)), [9, 9, 80], list(range(60, 100))]
FORMATS = (
    "awq",
    "gptq in act order",
    "bitsandbytes",
    "fp8",
    "fp8 in blocks",
    "pack-quantized",
    "int-quantized",
    "mxfp4",
)


def write_adapter(folder: Path, weights: Weights) -> LoRARequest:
    """Write an adapter in PEFT's layout."""
    tensors = {}
    for name, (a, b) in weights.items():
        before, after = ("lora_embedding_", "") if "embed" in name else ("lora_", ".weight")
        tensors |= {
            f"base_model.model.{name}.{before}{which}{after}": data
            for which, data in (("A", a), ("B", b))
        }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": SCALING * RANK,
        "target_modules": "all-linear",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("a", 1, str(folder))


def off(model: Any, prompt: list[int], output: Any) -> float:
    """Return the standard deviation of the errors of all logprobs, relative to that of the
    logprobs."""
    completion = output.outputs[0]
    with torch.no_grad():
        expected = (
            model(torch.tensor([[*prompt, *completion.token_ids]]))
            .logits[0]
            .float()
            .log_softmax(-1)[:-1]
        )
    rows = [*output.prompt_logprobs[1:], *completion.logprobs]
    found = torch.tensor([[row[token].logprob for token in sorted(row)] for row in rows])
    return float((found - expected).std() / expected.std())


def check(llm: LLM, model: Any, folder: Path, limit: float) -> None:
    """limit: of `off`. The batch is computed twice, so that the second one finds the prefixes of
    the first."""
    weights = random_adapter(model, RANK, 1)
    changed = merged(model, weights)
    lora = write_adapter(folder, weights)
    loras = [lora, None, None, lora]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for _ in range(2):
        outputs = llm.generate(prompts, PARAMS, lora_request=loras, use_tqdm=False)
        for prompt, used, output in zip(PROMPTS, loras, outputs, strict=True):
            own, other = (changed, model) if used else (model, changed)
            assert off(own, prompt, output) < limit < 0.2 < off(other, prompt, output)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("architecture", "case"),
    [*(("llama", case) for case in FORMATS), ("olmo2", "awq"), ("qwen2", "fp8")],
)
def test_over_stored_formats(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    architecture: str,
    case: str,
) -> None:
    reference = write(architecture, **SIZES)
    quantize(reference, case)
    with open_llm(
        reference.directory,
        download_dir=str(tmp_path / "cache"),
        enable_lora=True,
        max_lora_rank=RANK,
    ) as llm:
        check(llm, reference.model, tmp_path / "adapter", 1e-4 if case in FLOATS else 0.05)


@pytest.mark.parametrize(
    ("stored", "compute"), [("Q8_0", "float"), ("Q8_0", "native"), ("Q4_1", "native")]
)
def test_over_gguf(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    stored: str,
    compute: str,
) -> None:
    """The file has Q and K in another order of rows, and the adapter in PEFT's."""
    reference = write("llama", **SIZES)
    convert(reference, "llama", GGUF_CASES["llama"], tmp_path / "model.gguf", stored)
    kind = gguf.GGMLQuantizationType[stored]
    for parameter in reference.model.parameters():
        if parameter.dim() == 2:
            values = gguf.quants.dequantize(
                gguf.quants.quantize(parameter.detach().numpy(), kind), kind
            )
            parameter.data.copy_(torch.from_numpy(values))
    options = {"quantization.gguf": {"compute": compute}}
    settings = {
        "enable_lora": True,
        "max_lora_rank": RANK,
        "kv_cache_dtype": "float32",
        "plugin_options": options,
    }
    with open_llm(tmp_path / "model.gguf", download_dir=str(tmp_path / "cache"), **settings) as llm:
        check(llm, reference.model, tmp_path / "adapter", 1e-4 if compute == "float" else 0.05)


@pytest.mark.one_rank
@pytest.mark.parametrize(("ranks", "stages"), [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)])
def test_processes_that_divide_both_matrices(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    ranks: int,
    stages: int,
) -> None:
    """Ranks that exchange the products in a recorded step, with unequal shares of the heads."""
    reference = write("llama", **HEADS, max_position_embeddings=128)
    settings: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": RANK + 1,
        "fully_sharded_loras": True,
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": stages,
        "block_size": 16,
        "num_threads": 1,
    }
    with open_llm(reference.directory, **settings) as llm:
        check(llm, reference.model, tmp_path / "adapter", 1e-4)
