"""Tiny encoders that transformers writes, with tokenizers of words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pegboard import LLM

VOCAB_SIZE = 60
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
DISTIL_SIZES = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
ARCHITECTURES = {
    "Bert": SIZES,
    "Roberta": {**SIZES, "pad_token_id": 1, "type_vocab_size": 2, "layer_norm_eps": 1e-5},
    "XLMRoberta": {
        **SIZES,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
    },
    "DistilBert": DISTIL_SIZES,
    "MPNet": SIZES,
}
TEXTS = [
    "w1 w2 w3",
    "w9",
    " ".join(f"w{place % 50}" for place in range(61)),
    "w4 w4",
    "w7 w8 w9 w10 w11 w12 w13 w14 w15",
]


def write_tokenizer(folder: Path, *, is_roberta: bool) -> Any:
    """One token per word, with the special tokens of Bert or Roberta."""
    first, last, padding, unknown = (
        ("<s>", "</s>", "<pad>", "<unk>") if is_roberta else ("[CLS]", "[SEP]", "[PAD]", "[UNK]")
    )
    special = [first, padding, last, unknown] if is_roberta else [padding, unknown, first, last]
    ids = {
        word: place
        for place, word in enumerate([*special, *(f"w{place}" for place in range(VOCAB_SIZE - 4))])
    }
    own = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = (
        f"{first} $A {last} {last} $B {last}" if is_roberta else f"{first} $A {last} $B:1 {last}:1"
    )
    single = f"{first} $A {last}"
    tokens = [(token, ids[token]) for token in (first, last)]
    own.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=tokens
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own,
        cls_token=first,
        sep_token=last,
        pad_token=padding,
        unk_token=unknown,
        model_max_length=64,
    )
    made.save_pretrained(folder)
    return made


def make_encoder(
    folder: Path, name: str, head: str = "Model", **values: Any
) -> tuple[Path, Any, Any]:
    """Write an encoder. Return its folder, the model and its tokenizer."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 66,
        **ARCHITECTURES[name],
        **values,
    }
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, name + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    is_roberta = "oberta" in name or name == "MPNet"
    return folder, model, write_tokenizer(folder, is_roberta=is_roberta)


def open_encoder(folder: Path, **more: Any) -> LLM:
    """Open an engine with small steps."""
    small = {"max_num_batched_tokens": 80, "max_num_seqs": 3}
    return LLM(str(folder), dtype="float32", **{**small, **more})
