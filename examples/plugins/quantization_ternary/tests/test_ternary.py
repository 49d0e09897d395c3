"""The contract of the kind, packing, and an engine that serves a ternary checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pegboard_quantization_ternary.method import TernaryMethod
from pegboard_quantization_ternary.packing import pack, quantize, unpack
from pegboard_quantization_ternary.plugin import TERNARY
from safetensors.torch import save_file
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.errors import ModelError
from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import (
    QuantizationContract,
    load_pieces,
    stored_pieces,
)

QUANTIZATION = {"quant_method": "ternary", "ignore": ["lm_head"]}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
PROMPT = [3, 17, 42, 5, 60, 1]


def test_contract() -> None:
    check_entry(installed_entry("quantization", "ternary"))


def means(packed: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 values of stored tensors."""
    return (unpack(packed).float() - 1) * scale[:, None]


class TestTernary(QuantizationContract):
    spec = TERNARY
    config = QUANTIZATION
    block = 32

    def method(self, setup: QuantizationSetup) -> TernaryMethod:
        return TernaryMethod(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        packed, scale = quantize(values)
        tensors = {"weight_packed": packed, "weight_scale": scale}
        return stored_pieces(part.name.removesuffix(".weight"), tensors), means(packed, scale)

    def test_what_the_config_ignores_is_plain(self) -> None:
        method = self.make()
        rows = Part("lm_head.weight", (0, 8))
        assert method.linear(LinearLayer("lm_head", 32, 8, (rows,))) is None
        assert method.linear(LinearLayer("up", 32, 8, (Part("up.weight", (0, 8)),))) is not None

    def test_a_code_that_means_nothing_is_refused(self) -> None:
        layer = self.layer((4,), 32)
        tensors = {
            "weight_packed": torch.full((4, 8), 0b11, dtype=torch.uint8),
            "weight_scale": torch.ones(4),
        }
        with pytest.raises(ModelError, match=r"part0\.weight_packed has a code of 3"):
            load_pieces(self.linear(layer), stored_pieces("model.part0", tensors))

    def test_columns_that_are_no_whole_bytes_are_refused(self) -> None:
        with pytest.raises(ModelError, match="30 columns; ternary weights need a multiple of 4"):
            load_pieces(self.linear(self.layer((4,), 30)), [])


@given(st.integers(1, 5), st.integers(1, 9), st.randoms(use_true_random=False))
def test_packing_keeps_every_code(rows: int, num_bytes: int, random: Any) -> None:
    codes = torch.tensor(
        [[random.randrange(3) for _ in range(4 * num_bytes)] for _ in range(rows)],
        dtype=torch.uint8,
    )
    packed = pack(codes)
    assert packed.shape == (rows, num_bytes) and torch.equal(unpack(packed), codes)


def float_weights() -> dict[str, Tensor]:
    """Return the tensors of a small Llama."""
    random = torch.Generator().manual_seed(0)
    shapes = {
        f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()
    }
    shapes |= {"model.embed_tokens.weight": (64, 64), "lm_head.weight": (64, 64)}
    tensors = {
        name: torch.randn(shape, generator=random) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    norms = ["model.norm"] + [
        f"model.layers.{i}.{name}"
        for i in range(2)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    return tensors | {f"{name}.weight": torch.ones(64) for name in norms}


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def ternary(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the ternary checkpoint."""
    result = {name: tensor for name, tensor in tensors.items() if not is_quantized(name)}
    for name in filter(is_quantized, tensors):
        result[f"{name}_packed"], result[f"{name}_scale"] = quantize(tensors[name])
    return result


def write(folder: Path, tensors: dict[str, Tensor], **more: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}), "utf-8")
    return folder


def answer(folder: Path, **more: Any) -> tuple[list[int], list[float]]:
    """Return the greedy tokens, and the logprob of each token of the vocabulary in the first
    place. more: settings."""
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1, detokenize=False
    )
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 16}
    with LLM(str(folder), max_logprobs=-1, **settings, **more) as llm:
        prompt = {"prompt_token_ids": PROMPT}
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    first = output.logprobs[0]
    return list(output.token_ids), [first[token].logprob for token in range(64)]


def test_an_engine_computes_with_what_is_stored(tmp_path: Path) -> None:
    """It answers as with float weights of the same values. Rounding itself costs something: the
    weights of a row lose a part of their size, and so the logprobs move."""
    weights = float_weights()
    stored = ternary(weights)
    rounded = {
        name: means(stored[f"{name}_packed"], stored[f"{name}_scale"])
        if is_quantized(name)
        else tensor
        for name, tensor in weights.items()
    }
    errors = [
        float((rounded[name] - tensor).norm() / tensor.norm())
        for name, tensor in weights.items()
        if is_quantized(name)
    ]
    assert min(errors) > 0.4 and max(errors) < 0.6, "of normal weights, half of the size is lost"
    packed = write(tmp_path / "ternary", stored, quantization_config=QUANTIZATION)
    tokens, logprobs = answer(packed)
    exact_tokens, exact = answer(packed, plugins_deny=["pegboard-kernel-cpu"])
    same_tokens, same = answer(write(tmp_path / "rounded", rounded))
    _, before = answer(write(tmp_path / "floats", weights))
    assert tokens == exact_tokens == same_tokens
    # the kernels of pegboard-kernel-cpu round activations to 8 bits, and torch does not
    assert logprobs == pytest.approx(same, abs=0.05)
    assert exact == pytest.approx(same, abs=1e-4)
    moved = max(abs(a - b) for a, b in zip(logprobs, before, strict=True))
    assert 0.1 < moved < 5
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*/model.safetensors"))]
    assert sizes[2] < sizes[0] / 2, "the packed file is less than half of the one with floats"
