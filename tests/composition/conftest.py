"""Wheels of every distribution, built once, and a tiny checkpoint. The tests import `layers` from
this folder, and `page_server` from the tests of the pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from layers import ROOT, Layers, wheels_in

from pegboard_testing.authoring import release

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 257,
}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release, as `make release` writes it."""
    folder = tmp_path_factory.mktemp("release")
    release.build(ROOT, folder)
    return folder


@pytest.fixture(scope="session")
def wheels(built: Path) -> dict[str, Path]:
    """Distribution name → its wheel, for core and every plugin of the repository."""
    return wheels_in(built)


@pytest.fixture(scope="session")
def layers(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Layers:
    """Makes sets of our distributions over the third-party packages that they declare."""
    return Layers(wheels, tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, and a byte-level tokenizer whose tokens are single bytes."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("checkpoint")
    hidden = SIZES["hidden_size"]
    inner = SIZES["intermediate_size"]
    kv = SIZES["hidden_size"] // 2
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(SIZES["vocab_size"], hidden, generator=random)
    }
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(SIZES["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}{name}.weight": torch.randn(shape, generator=random) * 0.3
            for name, shape in shapes.items()
        }
        tensors |= {
            f"{prefix}{name}.weight": torch.ones(hidden)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
        "tie_word_embeddings": True,
        "eos_token_id": 256,
        **SIZES,
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {
        letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder
