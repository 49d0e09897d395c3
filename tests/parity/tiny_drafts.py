"""Tiny targets whose next token is mostly the one after the last, with a tokenizer of letters, and
drafts for them that are mostly right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draft_heads import Eagle
from safetensors.torch import load_file, save_file
from test_mtp_drafts import mimo
from tiny_heads import SIZE, counting_target, following, speculator_of_next, write_head
from tiny_models import VOCAB_SIZE, Reference, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

NUM_DRAFTS = 3
SPECIAL = ["<s>", "</s>", "<pad>"]
NOISE = 0.3
"""What layers add, as a share of random weights, so that drafts are not always right."""


@dataclass
class Drafted:
    """A target and the speculative config of its drafts. model: a transformers model with the names
    and the sizes of the target's weights, and with its embedding. num_groups: of the KV cache."""

    directory: Path
    model: Any
    config: dict[str, Any]
    num_groups: int = 1


def id_of(letter: str) -> int:
    """Return the token of an ASCII character."""
    return len(SPECIAL) + ord(letter)


def write_tokenizer(folder: Path) -> None:
    """A token for each byte of ASCII, after three special ones."""
    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: len(SPECIAL) + byte for byte in range(VOCAB_SIZE - len(SPECIAL))}
    vocabulary |= {text: number for number, text in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def make_uncertain(folder: Path) -> None:
    """Let the layers of a checkpoint that add nothing add something."""
    torch.manual_seed(13)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        if name.startswith("model.layers.") and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            stored[name] = torch.randn(tensor.shape) * NOISE / tensor.shape[-1] ** 0.5
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def counting(folder: Path) -> tuple[Reference, torch.Tensor]:
    """Return a Llama in which the token t + 1 follows t, and its embedding."""
    reference = Reference(folder / "model", make_model("llama"))
    reference.directory.mkdir()
    return reference, counting_target(reference)


def finished(reference: Reference, config: dict[str, Any], num_groups: int = 1) -> Drafted:
    make_uncertain(reference.directory)
    write_tokenizer(reference.directory)
    common = {"num_speculative_tokens": NUM_DRAFTS, "adaptive_length": False}
    return Drafted(reference.directory, reference.model, {**common, **config}, num_groups)


def draft_model(folder: Path) -> Drafted:
    """The draft model says what the target does without the noise. Its heads have another shape, so
    it has its own blocks of the KV cache."""
    reference, _ = counting(folder)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    second = Reference(folder / "second", make_model("llama", **heads))
    second.directory.mkdir()
    counting_target(second)
    config = {"method": "draft_model", "model": str(second.directory)}
    return finished(reference, config, num_groups=2)


def eagle(folder: Path) -> Drafted:
    """The head gives the embedding on, and adds some noise."""
    reference, _ = counting(folder)
    head = Eagle(reference.model)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(NOISE / 3)
        head.fc.weight.copy_(torch.eye(SIZE, 2 * SIZE) + 0.02 * torch.randn(SIZE, 2 * SIZE))
        head.fc.bias.zero_()
    return finished(reference, {"method": "eagle", "model": head.write(folder / "head")})


def medusa(folder: Path) -> Drafted:
    """The head number k says t + 2 + k."""
    reference, rows = counting(folder)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": SIZE,
        "vocab_size": VOCAB_SIZE,
        "num_heads": NUM_DRAFTS,
        "num_hidden_layers": 1,
    }
    tensors = {}
    for k in range(NUM_DRAFTS):
        tensors[f"blocks.{k}.layers.0.weight"] = 0.02 * torch.randn(SIZE, SIZE)
        tensors[f"lm_heads.{k}.weight"] = following(rows, k + 2)
    return finished(
        reference, {"method": "medusa", "model": write_head(folder / "head", config, tensors)}
    )


def mlp_speculator(folder: Path) -> Drafted:
    """The speculator says what the target does without the noise."""
    reference, rows = counting(folder)
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": VOCAB_SIZE,
        "emb_dim": SIZE,
        "inner_dim": SIZE,
        "n_predict": NUM_DRAFTS,
        "tie_weights": False,
        "scale_input": False,
    }
    head = write_head(folder / "head", config, speculator_of_next(rows, NUM_DRAFTS))
    return finished(reference, {"method": "mlp_speculator", "model": head})


def mtp(folder: Path) -> Drafted:
    """MiMo, with the embedding and the head of a target that counts."""
    predictor = mimo(folder / "model", is_right=True)
    rows = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, SIZE), dim=-1)
    path = predictor.directory / "model.safetensors"
    stored = load_file(path)
    stored["model.embed_tokens.weight"] = rows
    stored["lm_head.weight"] = following(rows, 1)
    save_file(stored, path, {"format": "pt"})
    with torch.no_grad():
        predictor.model.model.embed_tokens.weight.copy_(rows)
    return finished(Reference(predictor.directory, predictor.model), {"method": "mtp"})


METHODS: dict[str, Callable[[Path], Drafted]] = {
    "draft_model": draft_model,
    "eagle": eagle,
    "medusa": medusa,
    "mlp_speculator": mlp_speculator,
    "mtp": mtp,
}
