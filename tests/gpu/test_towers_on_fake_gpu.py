"""Towers of images, audio and video on a fake GPU: the rows are those of the CPU, and nothing of
the host is mixed with the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import test_aria_parity
import test_audio_parity
import test_bidirectional_parity
import test_blip2_parity
import test_chameleon_parity
import test_deepseek_ocr_parity
import test_deepseek_vl2_parity
import test_fuyu_parity
import test_glm4v_9b_parity
import test_glm4v_parity
import test_kimi_vl_parity
import test_llama4_media_parity
import test_media_sizes
import test_minicpmv_parity
import test_molmo_parity
import test_phi4mm_parity
import test_qwen3_vl_parity
import test_qwen_omni_parity
import test_siglip_parity
import test_ultravox_parity
import test_video_parity
from pegboard_weight_loader_safetensors.hf_files import read_config, with_defaults
from tiny_media import built_model
from tiny_whisper import write_whisper
from transformers import AutoTokenizer

from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup, Video
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard.plugins.importing import import_object, import_spec
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_gpu import DEVICE, FakeGPU
from pegboard_testing.media_peers import PeerTokenizer

SOUND = np.random.default_rng(3).standard_normal(16_000).astype(np.float32), 16_000
FRAMES = np.random.default_rng(4).integers(0, 255, (6, 24, 32, 3), np.uint8)
ITEMS: dict[str, Any] = {
    "image": random_image(40, 20, seed=1),
    "audio": SOUND,
    "video": Video(FRAMES, 2.0, (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)),
}
FAMILIES: dict[str, Callable[[Path], object]] = {
    # SAM of transformers takes rows by indices of the host, which a real device accepts
    **{
        name: write
        for name, (_, write) in test_media_sizes.FAMILIES.items()
        if "two towers" not in name
    },
    **{f"{kind}, video": writer[0] for kind, writer in test_video_parity.WRITERS.items()},
    **{
        kind: lambda folder, kind=kind: test_audio_parity.write(kind, folder)
        for kind in test_audio_parity.ENCODERS
    },
    **{
        kind: lambda folder, kind=kind: test_qwen_omni_parity.write(folder, kind)
        for kind in test_qwen_omni_parity.MODELS
    },
    "aria": test_aria_parity.write,
    "gemma3": test_bidirectional_parity.gemma3,
    "paligemma": test_bidirectional_parity.paligemma,
    "blip2": test_blip2_parity.write,
    "chameleon": test_chameleon_parity.write,
    "deepseek_ocr": test_deepseek_ocr_parity.write,
    "deepseek_vl2": test_deepseek_vl2_parity.write,
    "fuyu": test_fuyu_parity.write,
    "glm4v": lambda folder: test_glm4v_parity.write(folder, "glm4v"),
    "glm4v_9b": lambda folder: test_glm4v_9b_parity.write(
        folder, architectures=["GLM4VForCausalLM"], auto_map={}
    ),
    "kimi_vl": test_kimi_vl_parity.write,
    "llama4": test_llama4_media_parity.write,
    "molmo": lambda folder: test_molmo_parity.write(folder, auto_map={}),
    "phi4mm": test_phi4mm_parity.write,
    "minicpmo": lambda folder: test_minicpmv_parity.write(folder, "o 2.6"),
    "minicpmv": test_minicpmv_parity.write,
    "qwen3_vl": lambda folder: test_qwen3_vl_parity.write(folder, "qwen3_vl"),
    "siglip": test_siglip_parity.write,
    "ultravox": test_ultravox_parity.write,
    "whisper": write_whisper,
}


def processor_of(folder: Path, config: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Return our processor, and the modalities that it takes."""
    entry = installed_entry("multimodal_processor", config["architectures"][0])
    spec: Any = import_spec(entry)
    checkpoint = Checkpoint(
        format="safetensors",
        path=folder,
        config=config,
        architectures=tuple(config["architectures"]),
        tensors={},
        tokenizer=TokenizerPayload("hf", folder),
    )
    tokenizer: Any = PeerTokenizer(AutoTokenizer.from_pretrained(folder))
    setup = MultiModalProcessorSetup(checkpoint, tokenizer)
    return import_object(spec.implementation)(None, setup), spec.modalities


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
