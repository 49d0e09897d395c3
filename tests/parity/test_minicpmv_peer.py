"""The rows of MiniCPM-V and MiniCPM-o, compared with those of vLLM's modules.

Opt-in: PEGBOARD_PEER_VLLM names the Python of an environment that has vLLM (CPU).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_minicpmv.minicpmo import MiniCPMO
from pegboard_model_minicpmv.minicpmv import MiniCPMV
from safetensors.torch import load_file, save_file
from test_audio_parity import RATE, tone
from test_minicpmv_parity import OMNI, VARIANTS, write
from tiny_media import built_model

from pegboard_testing.contract_multimodal_processor import random_image

PEER = os.environ.get("PEGBOARD_PEER_VLLM")

pytestmark = pytest.mark.skipif(PEER is None, reason="PEGBOARD_PEER_VLLM names no Python with vLLM")


@pytest.mark.parametrize("variant", [*VARIANTS, *OMNI])
def test_rows(tmp_path: Path, variant: str) -> None:
    """Of an image in slices, and of speech in parts."""
    assert PEER is not None
    reference = write(tmp_path, variant)
    items: dict[str, Any] = {"image": random_image(80, 70, 3)}
    if variant in OMNI:
        items["audio"] = tone(40_100, 2), RATE
    model, _ = built_model(MiniCPMO if variant in OMNI else MiniCPMV, tmp_path)
    ours = {}
    given = {}
    for modality, item in items.items():
        processed = reference.processor.process(modality, item, {})
        arrays = {name: torch.from_numpy(value) for name, value in processed.arrays.items()}
        given |= {f"{modality}.{name}": value for name, value in arrays.items()}
        with torch.no_grad():
            (ours[modality],) = model.encode(modality, [arrays])
    files = tmp_path / "items.safetensors", tmp_path / "rows.safetensors"
    save_file(given, files[0])
    script = Path(__file__).with_name("vllm_minicpm.py")
    command = [PEER, str(script), str(tmp_path), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(files[1])
    assert theirs.keys() == ours.keys()
    for modality, rows in ours.items():
        torch.testing.assert_close(rows, theirs[modality], atol=1e-4, rtol=1e-4)
