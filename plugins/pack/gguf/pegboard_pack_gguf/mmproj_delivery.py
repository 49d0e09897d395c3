"""Brings tensors of towers into the form that models on Hugging Face have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry, WeightPiece
from pegboard_pack_gguf.architectures import joined_parts
from pegboard_pack_gguf.delivery import as_floats, changed, floats, joined
from pegboard_pack_gguf.mmproj_qwen_vl import JOINED
from pegboard_pack_gguf.mmproj_square import SOFT_NORM

Read = Callable[[TensorEntry], WeightPiece]
_IN_PAIRS = re.compile(r".+\.attention\.[qk]_proj\.(weight|bias)")


def delivered(entry: TensorEntry, checkpoint: Checkpoint, read: Read) -> WeightPiece:
    """Return a tensor. Those that no linear layer multiplies with become floats. read: returns a
    tensor of the file. Raises ModelError."""
    tensors = checkpoint.tensors
    if names := joined_parts(JOINED, entry.name, tensors):
        return joined(entry, [read(tensors[name]) for name in names])
    if f"{entry.name}.0" in tensors:
        names = tuple(f"{entry.name}.{frame}" for frame in range(entry.shape[2]))
        frames = [floats(read(tensors[name])) for name in names]
        return WeightPiece(entry.name, "float32", entry.shape, torch.stack(frames, 2))
    vision = checkpoint.config.get("vision_config", {})
    piece = read(entry)
    is_module = entry.name.endswith(".weight") and "embed" not in entry.name
    if isinstance(piece.data, memoryview) and not (is_module and len(entry.shape) == 2):
        piece = as_floats(piece)
    if entry.name == SOFT_NORM and isinstance(piece.data, Tensor):
        return replace(piece, stored="float32", data=piece.data.float() - 1.0)
    if vision.get("model_type") == "pixtral" and _IN_PAIRS.fullmatch(entry.name):
        heads = vision["num_attention_heads"]
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads}
        return changed(piece, "unpermute", sizes)
    return piece
