"""Checkpoints of the common formats, written tensor by tensor as the formats define them, give the logits of the model with the
dequantized weights, up to the rounding of activations in kernels that multiply integers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pegboard import LLM, SamplingParams

PROMPTS = [[7, 30, 101, 12, 5], list(range(3, 60))]
PARAMS = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
GROUP = 32
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def stream(codes: np.ndarray, bits: int) -> Tensor:
    """Pack codes [n, m] along n as a stream of bits in 32-bit words."""
    n, m = codes.shape
    flags = (codes[:, None, :] >> np.arange(bits)[None, :, None] & 1).reshape(n * bits, m).astype(np.uint32)
    packed = (flags.reshape(-1, 32, m) << np.arange(32, dtype=np.uint32)[None, :, None]).sum(1, dtype=np.uint32)
    return torch.from_numpy(packed.view(np.int32))


def rounded(weight: Tensor, bits: int, group: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Round with a scale and a zero point per row and group of columns. Returns codes, zeros, scales and the values."""
    values, count = weight.numpy(), int(group.max()) + 1
    low = np.stack([values[:, group == g].min(1) for g in range(count)], 1).clip(max=0)
    high = np.stack([values[:, group == g].max(1) for g in range(count)], 1).clip(min=0)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.round(-low / wide), 1, 2**bits - 1).astype(np.int64)
    codes = np.clip(np.round(values / wide[:, group]) + zeros[:, group], 0, 2**bits - 1).astype(np.int64)
    return codes, zeros, scales, torch.from_numpy((codes - zeros[:, group]).astype(np.float32) * wide[:, group])


def as_awq(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, values = rounded(weight, 4, np.arange(weight.shape[1]) // GROUP)
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(rows: np.ndarray) -> Tensor:  # eight rows of the weight in a word
        return stream(rows.reshape(-1, 8, rows.shape[1])[:, places].reshape(rows.shape), 4).T.contiguous()

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": torch.from_numpy(scales.T.copy())}, values


def as_gptq(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    group = np.arange(weight.shape[1]) // GROUP
    if order:
        group = np.random.default_rng(weight.shape[1]).permutation(group)
    codes, zeros, scales, values = rounded(weight, bits, group)
    tensors = {
        "qweight": stream(codes.T, bits),
        "qzeros": stream(zeros - 1, bits).T.contiguous(),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(group.astype(np.int32)),
    }
    return tensors, values


def quantize(reference: Any, config: dict[str, Any], store: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]) -> None:
    """Replace the linear layers of the checkpoint by what `store` makes of them, and those of the model by their values."""
    path = reference.directory / "model.safetensors"
    tensors = {}
    modules = dict(reference.model.named_modules())
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        if module.endswith(LINEAR):
            stored, values = store(tensor)
            tensors |= {f"{module}.{part}": value for part, value in stored.items()}
            modules[module].weight.data.copy_(values)
        else:
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    file = reference.directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))


@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
@pytest.mark.parametrize(
    ("method", "bits", "order"),
    [("awq", 4, False), ("gptq", 4, False), ("gptq", 4, True), ("gptq", 8, True), ("gptq", 3, False), ("gptq", 2, False)],
)
def test_the_logits_of_the_dequantized_model(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    architecture: str,
    method: str,
    bits: int,
    order: bool,
) -> None:
    reference = write(architecture, **SIZES)
    store = {"awq": as_awq, "gptq": as_gptq}[method]
    config = {"quant_method": method, "bits": bits, "group_size": GROUP, "desc_act": order, "zero_point": True, "version": "gemm"}
    quantize(reference, config, lambda weight: store(weight, bits, order))
    expected = torch.cat([reference.logprobs(prompt)[:-1] for prompt in PROMPTS])
    asked = None if bits == 4 else f"{method}_marlin"  # another name of the same plugin
    with open_llm(reference.directory, download_dir=str(tmp_path / "cache"), quantization=asked) as llm:
        rows = []
        for output in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False):
            for row in (output.prompt_logprobs or [])[1:]:
                assert row is not None
                rows.append([row[token].logprob for token in sorted(row)])
    off = ((torch.tensor(rows) - expected).std() / expected.std()).item()
    assert off < 0.05
