"""The contract of the processor, and the answers of an engine: those to the prompt with the rows of
the image given as embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_model_colours.processor import ColoursProcessor
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from pegboard import LLM, SamplingParams
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    MultiModalProcessorContract,
    random_image,
)

TOKEN = 20
TEXT = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
CONFIG = {
    "architectures": ["ColoursForConditionalGeneration"],
    "image_token_id": TOKEN,
    "text_config": TEXT,
    "dtype": "float32",
}
SHAPES = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
NORMS = ("input_layernorm", "post_attention_layernorm")


def make_tokenizer() -> Tokenizer:
    words = {f"w{number}": number for number in range(TOKEN)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    return tokenizer


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of random weights, and return them."""
    random = torch.Generator().manual_seed(0)
    tensors = {"colours.weight": torch.randn(16, 3, generator=random)}
    root = "language_model.model."
    tensors[f"{root}embed_tokens.weight"] = torch.randn(24, 16, generator=random)
    tensors[f"{root}norm.weight"] = torch.ones(16)
    for layer in range(2):
        path = f"{root}layers.{layer}."
        for name, shape in SHAPES.items():
            tensors[f"{path}{name}.weight"] = torch.randn(shape, generator=random) * 0.4
        tensors |= {f"{path}{name}.weight": torch.ones(16) for name in NORMS}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return tensors


def test_contract() -> None:
    for kind in ("model", "multimodal_processor"):
        check_entry(installed_entry(kind, "ColoursForConditionalGeneration"))


class TestColoursProcessor(MultiModalProcessorContract):
    def tokenizer(self) -> Any:
        encode = make_tokenizer().encode
        return SimpleNamespace(encode=lambda text, add_special_tokens: encode(text).ids)

    def processor(self) -> ColoursProcessor:
        checkpoint: Any = SimpleNamespace(config=CONFIG)
        return ColoursProcessor(None, MultiModalProcessorSetup(checkpoint, self.tokenizer()))

    def items(self) -> list[tuple[str, Any]]:
        return [("image", random_image(*size)) for size in ((1, 1), (90, 11), (50, 50))]

    def num_rows(self, modality: str, arrays: Any) -> int:
        return len(arrays["colours"])


def test_the_answers_of_an_engine(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    image = random_image(40, 30, seed=3)
    colours = np.asarray(image.resize((4, 4), Image.Resampling.BOX), np.float32) / 255
    rows = torch.from_numpy(colours.reshape(16, 3)) @ tensors["colours.weight"].T
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 8}
    with LLM(str(tmp_path), max_num_seqs=2, enable_prompt_embeds=True, **settings) as llm:
        prompt = {"prompt": "w3 <image> w4", "multi_modal_data": {"image": image}}
        given = {"prompt_token_ids": [3, *[TOKEN] * 16, 4], "prompt_embeds": {1: rows}}
        other = {**prompt, "multi_modal_data": {"image": random_image(40, 30, seed=4)}}
        outputs = llm.generate([prompt, given, other], params, use_tqdm=False)
    scores = [output.outputs[0].cumulative_logprob for output in outputs]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert scores[0] != pytest.approx(scores[2], abs=1e-4)
