"""Tiny checkpoints of all models that read images, audio or video, and an item of each sort."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from tiny_whisper import write_whisper
from transformers import PreTrainedTokenizerFast

from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup, Video
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard.plugins.importing import import_object, import_spec
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
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
    tokenizer: Any = PeerTokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
    setup = MultiModalProcessorSetup(checkpoint, tokenizer)
    return import_object(spec.implementation)(None, setup), spec.modalities
