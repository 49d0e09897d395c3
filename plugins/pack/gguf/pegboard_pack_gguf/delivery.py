"""Brings tensors of a file into the form that models on Hugging Face have. See
`table_parts.Change`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import TensorEntry, WeightPiece
from pegboard_pack_gguf.dequantize import dequantize_into
from pegboard_pack_gguf.table_parts import Change


def changed(piece: WeightPiece, change: Change, config: Mapping[str, Any]) -> WeightPiece:
    """Returns the piece, changed, in new memory. config: the checkpoint's. Raises ModelError if the
    shape does not fit."""
    if change in ("transpose", "float"):
        return as_floats(piece, is_transposed=change == "transpose" and len(piece.shape) == 2)
    if change in ("flat", "convolution"):  # the shape alone, which the index has
        return piece
    if change == "logarithm":
        return replace(piece, stored="float32", data=torch.log(-floats(piece)))
    rows = piece.shape[0]
    if change == "by_key_head":
        order = _by_key_head(piece.name, rows, config)
    elif change == "by_head":
        order = _by_head(
            piece.name, rows, config["num_attention_heads"], config["num_key_value_heads"]
        )
    else:
        is_query = piece.name.rpartition(".")[0].endswith("q_proj")
        heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
        order = _rows(piece.name, rows, heads, -1, 2).swapaxes(1, 2)
    return replace(piece, data=_reordered(piece.data, order.reshape(-1)))


def joined(entry: TensorEntry, parts: Sequence[WeightPiece]) -> WeightPiece:
    """Returns the tensor `entry`, whose rows are those of the parts one after the other, in new
    memory."""
    if all(part.stored == entry.stored and not isinstance(part.data, Tensor) for part in parts):
        data: Tensor | memoryview = memoryview(
            b"".join(part.data for part in parts if not isinstance(part.data, Tensor))
        )
        return WeightPiece(entry.name, entry.stored, entry.shape, data)
    if all(part.stored == entry.stored for part in parts):
        data = torch.cat([part.data for part in parts if isinstance(part.data, Tensor)])
    else:
        data = torch.cat([floats(part) for part in parts])
    return WeightPiece(entry.name, entry.stored, entry.shape, data)


def up_projection(entry: TensorEntry, keys: WeightPiece, values: WeightPiece) -> WeightPiece:
    """Returns the tensor `entry` [H · (N + V), C] float32 of latent attention, in new memory. keys:
    [H, C, N]; values: [H, V, C]. Raises ModelError if the shapes do not fit."""
    of_keys = floats(keys).transpose(1, 2)
    of_values = floats(values)
    if of_values.dim() != 3 or of_values.shape[::2] != of_keys.shape[::2]:
        raise ModelError(
            f"tensor {values.name} has shape {values.shape}, which does not fit {keys.name} of "
            f"shape {keys.shape}"
        )
    joined = torch.cat((of_keys, of_values), dim=1).reshape(-1, of_keys.shape[2])
    if joined.shape != entry.shape:
        raise ModelError(
            f"{keys.name} and {values.name} have {tuple(joined.shape)} rows and columns, expected "
            f"{entry.shape}"
        )
    return WeightPiece(entry.name, "float32", entry.shape, joined)


def floats(piece: WeightPiece) -> Tensor:
    """Return the values of a tensor, float32."""
    if isinstance(piece.data, Tensor):
        return piece.data.float()
    values = torch.empty(piece.shape, dtype=torch.float32)
    dequantize_into(piece.data, piece.stored, values.view(-1, piece.shape[-1]))
    return values


def _rows(name: str, count: int, *shape: int) -> np.ndarray:
    """Returns the numbers 0…count - 1 in this shape. -1 = what is left, which is the last dimension
    if none is -1."""
    shape = shape if -1 in shape else (*shape, -1)
    known = int(np.prod([size for size in shape if size > 0]))
    if count % known:
        raise ModelError(
            f"tensor {name} has {count} rows, which cannot be divided into {known} equal parts"
        )
    return np.arange(count).reshape(shape)


def _by_head(name: str, count: int, heads: int, kv_heads: int) -> np.ndarray:
    """Returns the order that puts the rows of each KV head together: its queries, its key and its
    value."""
    groups = _rows(name, count, heads + 2 * kv_heads)
    parts = np.split(groups, (heads, heads + kv_heads))
    return np.concatenate([part.reshape(kv_heads, -1) for part in parts], axis=1)


def _by_key_head(name: str, count: int, config: Mapping[str, Any]) -> np.ndarray:
    """Returns the order that puts the rows of each key head together: its query, its key, its
    values, and their gates."""
    heads = config["linear_num_key_heads"]
    key_dim = config["linear_key_head_dim"]
    value_dim = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    sizes = (heads * key_dim, heads * key_dim, value_dim, value_dim)
    if sum(sizes) != count or value_dim % heads:
        raise ModelError(
            f"tensor {name} has {count} rows, expected {' + '.join(map(str, sizes))} for {heads} "
            "key heads"
        )
    parts = np.split(np.arange(count), np.cumsum(sizes)[:-1])
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1)


def _reordered(data: Tensor | memoryview, order: np.ndarray) -> Tensor | memoryview:
    if isinstance(data, Tensor):
        return data[torch.from_numpy(np.ascontiguousarray(order))]
    rows = np.frombuffer(data, np.uint8).reshape(len(order), -1)
    return memoryview(rows[order].reshape(-1))


def as_floats(piece: WeightPiece, is_transposed: bool = False) -> WeightPiece:
    """Return a tensor whose blocks are dequantized."""
    if isinstance(piece.data, Tensor):
        if not is_transposed:
            return piece
        stored = piece.data.view(piece.shape[::-1])
        return replace(piece, data=stored.T.contiguous())
    shape = piece.shape[::-1] if is_transposed else piece.shape
    values = torch.empty(shape, dtype=torch.float32)
    dequantize_into(piece.data, piece.stored, values)
    return replace(piece, stored="float32", data=values.T.contiguous() if is_transposed else values)
