"""Towers of images, audio and video on a fake GPU: the rows are those of the CPU, and nothing of
the host is mixed with the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from media_families import FAMILIES, ITEMS, processor_of
from tiny_media import built_model

from pegboard.plugins.importing import import_object, import_spec
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.fake_gpu import DEVICE, FakeGPU
from pegboard_weights.hf_files import read_config, with_defaults


@pytest.mark.sampled(3)
@pytest.mark.parametrize("write", FAMILIES.values(), ids=FAMILIES.keys())
def test_rows(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path)
    config = with_defaults(read_config(tmp_path))
    processor, modalities = processor_of(tmp_path, config)
    entry = installed_entry("model", config["architectures"][0])
    kind: Any = import_object(import_spec(entry).implementation)
    items = {}
    for modality in modalities:
        processed = processor.process(modality, ITEMS[modality], {})
        items[modality] = {name: torch.from_numpy(v) for name, v in processed.arrays.items()}
    model, _ = built_model(kind, tmp_path)
    expected = {name: model.encode(name, [arrays])[0] for name, arrays in items.items()}
    with FakeGPU(), torch.inference_mode():
        model, _ = built_model(kind, tmp_path, device=DEVICE)
        for modality, arrays in items.items():
            on_device = {name: value.to(DEVICE) for name, value in arrays.items()}
            (rows,) = model.encode(modality, [on_device])
            torch.testing.assert_close(
                rows.cpu(), expected[modality], rtol=1e-4, atol=1e-4, msg=modality
            )
