"""Quantized checkpoints on the fake GPU: weights stay packed in its memory, and the tokens are
those of transformers with the dequantized weights."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_parity import check_on_gpu
from pegboard_kernel_triton import packed_product
from stored_layouts import CASES, ROUNDED, quantize, store_experts_in_mxfp4
from test_experts_parity import ARCHITECTURES
from test_rounded_activations import check_rounded
from tiny_models import Reference, make_model

pytestmark = pytest.mark.usefixtures("interpreted_triton")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "tie_word_embeddings": False,
    "num_hidden_layers": 1,
}
PACKED = ("block_weight", "code_weight")
OFTEN = (
    "awq",
    "gptq in act order",
    "gptq with 3 bits",
    "int-quantized, turned",
    "fp8 in blocks",
    "modelopt_fp4",
    "mxfp4",
    "bitsandbytes",
)
"""What every run tests: one format of each form."""
ROUNDED_OFTEN = ("int8 per token",)


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs make the interpreter faster."""
    choose = packed_product.choose_tiles
    monkeypatch.setattr(
        packed_product, "choose_tiles", lambda *given: choose(*given)._replace(rows=256)
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in OFTEN else pytest.mark.slow) for case in CASES],
)
def test_quantized_checkpoints(case: str, tmp_path: Path) -> None:
    model = make_model("llama", **SIZES)
    model.save_pretrained(tmp_path)
    reference = Reference(tmp_path, model)
    quantize(reference, case)
    check_on_gpu(reference, PACKED, activation_quantization="none")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ROUNDED_OFTEN else pytest.mark.slow)
        for case in ROUNDED
    ],
)
def test_rounded_activations(case: str, tmp_path: Path) -> None:
    """Where a GPU multiplies codes with codes, it does so without being asked."""
    model = make_model("llama", **{**SIZES, "hidden_size": 128, "intermediate_size": 128})
    model.save_pretrained(tmp_path)
    reference = Reference(tmp_path, model)
    quantize(reference, case)
    check_on_gpu(reference, PACKED, check=partial(check_rounded, case=case, count=3))


MIXTURE = {
    **SIZES,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "norm_topk_prob": True,
}
EXPERTS = ("awq", "gptq in act order", "fp8 in blocks", "modelopt_fp4")


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPERTS)
def test_quantized_experts(case: str, tmp_path: Path) -> None:
    """All experts of a step are multiplied in one launch."""
    model = make_model("qwen3_moe", **MIXTURE)
    model.save_pretrained(tmp_path)
    reference = Reference(tmp_path, model)
    quantize(reference, case)
    check_on_gpu(reference, PACKED, activation_quantization="none")


@pytest.mark.slow
def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path) -> None:
    """With biases, sinks and windows. Attention is Triton's too."""
    model = make_model("gpt_oss", **{**ARCHITECTURES["gpt_oss"][1], "intermediate_size": 64})
    model.save_pretrained(tmp_path)
    reference = Reference(tmp_path, model)
    store_experts_in_mxfp4(reference)
    check_on_gpu(reference, by_triton=True)
