"""Tiny random Whispers, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_media import NUM_TEXT_TOKENS, MediaReference, Prompt, make_tokenizer
from tiny_models import VOCAB_SIZE
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

SECONDS = 2
RATE = 16_000
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
    *(f"<|{number / 50:.2f}|>" for number in range(12)),
]


def write_whisper(folder: Path, **config: Any) -> MediaReference:
    """Write a Whisper that hears two seconds at a time."""
    torch.manual_seed(3)
    sizes = WhisperConfig(
        vocab_size=VOCAB_SIZE,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=56,
        num_mel_bins=20,
        max_source_positions=SECONDS * 50,
        max_target_positions=96,
        bos_token_id=NUM_TEXT_TOKENS,
        eos_token_id=NUM_TEXT_TOKENS,
        pad_token_id=NUM_TEXT_TOKENS,
        decoder_start_token_id=NUM_TEXT_TOKENS + 1,
        **config,
    )
    model = WhisperForConditionalGeneration(sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.0 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape) * spread)
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)
    extractor.save_pretrained(folder)
    tokenizer = make_tokenizer(SPECIAL, "")
    tokenizer.save_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, torch.Tensor]:
        samples, rate = one["multi_modal_data"]["audio"]
        features = extractor(samples, sampling_rate=rate, return_tensors="pt").input_features
        ids = torch.tensor([tokenizer.encode(one["prompt"])])
        return {"input_features": features, "input_ids": ids}

    return WhisperReference(folder, model, inputs)


class WhisperReference(MediaReference):
    def logprobs(self, prompt: Prompt, outputs: Any) -> torch.Tensor:
        given = self.inputs(prompt)
        ids = torch.cat([given["input_ids"], torch.tensor([list(outputs)], dtype=torch.long)], 1)
        with torch.no_grad():
            logits = self.model(
                input_features=given["input_features"], decoder_input_ids=ids
            ).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def sound(seconds: float, seed: int) -> tuple[np.ndarray, int]:
    noise = np.random.default_rng(seed).standard_normal(int(seconds * RATE))
    return noise.astype(np.float32) * 0.1, RATE


def about(audio: Any, *words: int) -> Prompt:
    text = " ".join(f"w{word}" for word in words)
    return {"prompt": text, "multi_modal_data": {"audio": audio}}
