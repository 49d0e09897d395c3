"""State-space models and hybrids on the fake GPU: decodes are replayed, nothing waits for the
device, and the tokens are those of transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_parity import check_on_gpu
from test_state_parity import ARCHITECTURES
from tiny_models import Reference, make_model

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]

KERNELS = (
    "causal_conv",
    "selective_scan",
    "chunked_scan",
    "gated_delta_rule",
    "gated_norm",
    "float_weight",
)
FEW = {"num_hidden_layers": 1}
MIXED = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
MODELS = {
    "mamba": FEW,
    "mamba2": FEW,
    "jamba": {"num_hidden_layers": 3},
    "qwen3_next": MIXED,
}


def check(name: str, folder: Path, kernels: tuple[str, ...]) -> None:
    model_type, config = ARCHITECTURES[name]
    model = make_model(model_type, **{**config, **MODELS[name]})
    model.save_pretrained(folder)
    check_on_gpu(Reference(folder, model), kernels, mamba_block_size=8)


@pytest.mark.parametrize("name", MODELS)
def test_kernels(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, KERNELS)


@pytest.mark.parametrize("name", MODELS)
def test_references(name: str, tmp_path: Path) -> None:
    """In torch, rows of several tokens are computed one after another."""
    check(name, tmp_path, KERNELS[-1:])
