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

pytestmark = pytest.mark.usefixtures("interpreted_triton")

MODELS = ("mamba", "mamba2", "jamba", "qwen3_next")


@pytest.mark.parametrize("name", MODELS)
def test_references(name: str, tmp_path: Path) -> None:
    """In torch, rows of several tokens are computed one after another."""
    model_type, config = ARCHITECTURES[name]
    model = make_model(model_type, **config)
    model.save_pretrained(tmp_path)
    check_on_gpu(Reference(tmp_path, model), ("float_weight",), mamba_block_size=8)
