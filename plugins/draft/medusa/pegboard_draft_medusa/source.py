"""What the heads are built from. The names of tensors and values follow vLLM's medusa.py."""

from __future__ import annotations

import re
from dataclasses import replace

from pegboard.errors import ModelError
from pegboard.interfaces.draft import DraftSource
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_drafts.sources import named_by_user, positive, target_sizes

OLD = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<linear>linear\.)?(?P<part>weight|bias)")
"""The tensors of FasterDecoding/Medusa: 0.0.linear.weight is the first block of the first head, and
0.1.weight its output head."""
ARCHITECTURE = "MedusaModel"
WHAT = "Medusa"


def source(target: Checkpoint, draft: Checkpoint | None) -> DraftSource:
    """Return the heads, which read the target's last hidden states. Raises ConfigError if the user
    has named none, and ModelError if they do not fit the target."""
    heads = named_by_user(draft, "medusa")
    heads = replace(
        heads,
        tensors={
            name: replace(entry, name=name, key=entry.key or entry.name)
            for entry in heads.tensors.values()
            for name in [new_name(entry.name)]
        },
    )
    config = heads.config
    hidden_size, vocab_size = target_sizes(
        target, heads, {name: config.get(name) for name in ("hidden_size", "vocab_size")}
    )
    num_heads = config.get("medusa_num_heads", config.get("num_heads"))
    num_layers = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    count = positive(
        heads, WHAT, "truncated_vocab_size", config.get("truncated_vocab_size") or vocab_size
    )
    num_rows = head_size(heads, vocab_size)
    values = {
        "num_heads": positive(heads, WHAT, "num_heads", num_heads),
        "num_hidden_layers": positive(heads, WHAT, "num_hidden_layers", num_layers),
        "truncated_vocab_size": count,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "head_size": num_rows,
        "architectures": [ARCHITECTURE],
    }
    if count > min(vocab_size, num_rows):
        raise ModelError(
            f"{heads.path}: truncated_vocab_size={count}, and its heads have {num_rows} rows for "
            f"the {vocab_size} tokens of {target.path}; expected at most the smaller number, so "
            "name heads that were made for this model, or correct their config"
        )
    if count < vocab_size and "token_map" not in heads.tensors:
        raise ModelError(
            f"{heads.path}: truncated_vocab_size={count} of {vocab_size} tokens needs the tensor "
            "token_map, which says what tokens these are; convert the heads with it"
        )
    heads = replace(heads, config={**config, **values}, architectures=(ARCHITECTURE,))
    return DraftSource(heads, num_drafts=values["num_heads"])


def new_name(name: str) -> str:
    """Return the name that vLLM gives to a tensor of FasterDecoding/Medusa, and all other names as
    they are."""
    name = name.replace("medusa_heads.", "")
    match = OLD.fullmatch(name)
    if match is None:
        return name
    if match["linear"]:
        return f"blocks.{match['head']}.layers.{match['layer']}.{match['part']}"
    return f"lm_heads.{match['head']}.{match['part']}"


def head_size(heads: Checkpoint, vocab_size: int) -> int:
    """Return the rows of the output heads that are stored. They may be those of the whole
    vocabulary, though the heads use only a part of it. Without output heads, return vocab_size."""
    shared = ["lm_head.weight"] if heads.config.get("original_lm_head") else []
    names = [name for name in (*shared, "lm_heads.0.weight") if name in heads.tensors]
    return heads.tensors[names[0]].shape[0] if names else vocab_size
