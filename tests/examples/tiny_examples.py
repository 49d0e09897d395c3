"""Tiny checkpoints with random weights for the examples whose models are too large for tests."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    WhisperFeatureExtractor,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "contrib/vllm/compat/tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import tiny_drafts
from tiny import VOCAB_SIZE, write_adapter, write_bert, write_llama, write_tokenizer
from tiny_heads import NUM_DRAFTS, SIZE, speculator_of_next, write_head
from tiny_media import MEDIA_TEXT, make_tokenizer, write_llava
from tiny_whisper import write_whisper

ROOT = Path(__file__).parents[2]
CONTEXT = 1024
MARKS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")


def write_model(folder: Path) -> Path:
    """Write a Llama whose prompts may be long: a token is a byte."""
    write_llama(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return folder


def write_trained(folder: Path, model: Path) -> Path:
    """Write the same model with its layers in the other order."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    names = {name: name.translate(str.maketrans("01", "10")) for name in tensors}
    changed = {name: tensors[other].clone() for name, other in names.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_vectors(folder: Path) -> Path:
    """Write a Bert without a head."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    write_tokenizer(folder, pairs=True)
    return folder


def write_listener(folder: Path) -> Path:
    """Write a Qwen2-Audio that hears one second at a time."""
    torch.manual_seed(0)
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **MEDIA_TEXT},
        audio_config={
            "d_model": 24,
            "encoder_layers": 2,
            "encoder_attention_heads": 3,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 10,
            "max_source_positions": 50,
        },
        audio_token_index=100,
    )
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=10, chunk_length=1).save_pretrained(folder)
    make_tokenizer(MARKS, MARKS[0]).save_pretrained(folder)
    return folder


def write_speculator(folder: Path) -> tuple[Path, Path]:
    """Write a Llama that counts the letters up, and an MLP speculator that does so too. Return
    their folders."""
    folder.mkdir()
    reference, rows = tiny_drafts.counting(folder)
    tiny_drafts.write_tokenizer(reference.directory)
    sizes = {"emb_dim": SIZE, "inner_dim": SIZE, "n_predict": NUM_DRAFTS}
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": len(rows),
        "tie_weights": False,
        "scale_input": False,
        **sizes,
    }
    head = write_head(folder / "head", config, speculator_of_next(rows, NUM_DRAFTS))
    return reference.directory, Path(head)


def write_all(root: Path) -> dict[str, Path]:
    """Write everything, and return the folders by the words that stand for them."""
    target, speculator = write_speculator(root / "drafts")
    model = write_model(root / "model")
    return {
        "MODEL": model,
        "TRAINED": write_trained(root / "trained", model),
        "VECTORS": write_vectors(root / "vectors"),
        "CLASSES": write_bert(root / "classes", num_labels=3),
        "SCORES": write_bert(root / "scores", num_labels=1),
        "ADAPTER_1": write_adapter(root / "adapter-1", 1),
        "ADAPTER_2": write_adapter(root / "adapter-2", 2),
        "LISTENER": write_listener(root / "listener"),
        "WHISPER": write_whisper(root / "whisper").directory,
        "IMAGES": write_llava(root / "images").directory,
        "TARGET": target,
        "SPECULATOR": speculator,
    }
