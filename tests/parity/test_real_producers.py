"""Weights that the producers of checkpoints write mean what these producers dequantize them to.
Opt-in, because the producers are not dependencies:

    PEGBOARD_TEST_PRODUCERS   Python of an environment with torch, safetensors, and any of hqq,
    bitsandbytes, torchao and
                              compressed-tensors
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.ops import REFERENCES
from pegboard.plugins.importing import import_part, import_spec
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.contract_quantization import load_pieces, stored_pieces

PYTHON = os.environ.get("PEGBOARD_TEST_PRODUCERS")
ROUNDED_ELSEWHERE = ("hqq", "bitsandbytes int8")
"""(code − zero) · scale of HQQ is code · scale − zero · scale here, and bitsandbytes multiplies by
1 / 127 last. Both differ by the last bits of float32."""


@pytest.mark.skipif(not PYTHON, reason="set PEGBOARD_TEST_PRODUCERS")
def test_weights_mean_what_their_producers_dequantize_them_to(tmp_path: Path) -> None:
    script = Path(__file__).with_name("write_with_producers.py")
    subprocess.run([str(PYTHON), str(script), str(tmp_path)], check=True)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert files, "no producer is installed"
    wrong = [path.stem for path in files if not is_read_exactly(path)]
    assert not wrong


def is_read_exactly(path: Path) -> bool:
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    true = tensors.pop("dequantized")
    entry = installed_entry("quantization", config["quant_method"])
    method = import_part(entry, import_spec(entry).implementation, "implementation")
    rows, columns = true.shape
    weight = method(None, QuantizationSetup(config, "float32", "cpu", REFERENCES)).linear(
        LinearLayer("m", columns, rows, (Part("m.weight", (0, rows)),))
    )
    load_pieces(
        weight,
        stored_pieces("m", {name.removeprefix("m."): data for name, data in tensors.items()}),
    )
    found = weight.dequantize().to(true.dtype)
    if path.stem.startswith(ROUNDED_ELSEWHERE):
        return bool(((found - true).abs().max() <= 2e-7 * true.abs().max()).item())
    return torch.equal(found, true)
