"""Quantized checkpoints on the fake GPU: weights stay packed in its memory, and the tokens are
those of transformers with the dequantized weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_parity import check_on_gpu
from stored_layouts import CASES, quantize
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
    "awq next to plain parts",
    "gptq in act order",
    "gptq with 3 bits",
    "int-quantized, turned",
    "fp8 in blocks",
    "modelopt_fp4",
    "mxfp4",
    "bitsandbytes",
)
"""What every run tests: one format of each form."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in OFTEN else pytest.mark.slow) for case in CASES],
)
def test_quantized_checkpoints(case: str, tmp_path: Path) -> None:
    model = make_model("llama", **SIZES)
    model.save_pretrained(tmp_path)
    reference = Reference(tmp_path, model)
    quantize(reference, case)
    check_on_gpu(reference, PACKED)
