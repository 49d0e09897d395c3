"""Brings tensors of vision towers into the form that models on Hugging Face have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from pegboard.interfaces.weight_loader import TensorEntry, WeightPiece
from pegboard_pack_gguf.delivery import as_floats, changed
from pegboard_pack_gguf.mmproj_square import SOFT_NORM

Read = Callable[[TensorEntry], WeightPiece]
_IN_PAIRS = re.compile(r".+\.attention\.[qk]_proj\.(weight|bias)")


def delivered(entry: TensorEntry, config: Mapping[str, Any], read: Read) -> WeightPiece:
    """Return a tensor. Those that no linear layer multiplies with become floats. config: the
    checkpoint's. read: returns a tensor of the file. Raises ModelError."""
    vision = config["vision_config"]
    piece = read(entry)
    is_module = entry.name.endswith(".weight") and "embedding" not in entry.name
    if isinstance(piece.data, memoryview) and not (is_module and len(entry.shape) == 2):
        piece = as_floats(piece)
    if entry.name == SOFT_NORM and isinstance(piece.data, Tensor):
        return replace(piece, stored="float32", data=piece.data.float() - 1.0)
    if vision["model_type"] == "pixtral" and _IN_PAIRS.fullmatch(entry.name):
        heads = vision["num_attention_heads"]
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads}
        return changed(piece, "unpermute", sizes)
    return piece
