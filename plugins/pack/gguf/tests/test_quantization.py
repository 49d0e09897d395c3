from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_pack_gguf.dequantize import CHUNK_ELEMENTS, dequantize_into
from pegboard_pack_gguf.ggml_types import BY_STORED, GGML_TYPES, GGMLType
from pegboard_pack_gguf.loader import GGUFLoader
from pegboard_pack_gguf.quantization import GGUFQuantization

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightLoaderSetup, WeightPiece, WeightSlice

BLOCK_TYPES = [known for known in GGML_TYPES.values() if known.block_size > 1]


def quantization(dtype: str = "float32") -> GGUFQuantization:
    return GGUFQuantization(None, QuantizationSetup(config={"quant_method": "gguf"}, dtype=dtype, device="cpu"))


def blocks_of(known: GGMLType, num_blocks: int, seed: int) -> np.ndarray:
    """Random bytes: any bit pattern is a block, with every scale there is, infinite and NaN ones too."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, known.block_bytes), dtype=np.uint8)


def oracle(blocks: np.ndarray, known: GGMLType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[known.name]).astype(np.float32)


@pytest.mark.parametrize("known", BLOCK_TYPES, ids=lambda known: known.name)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40), per_row=st.integers(1, 3))
def test_every_type_equals_the_package_bit_by_bit(known: GGMLType, seed: int, rows: int, per_row: int) -> None:
    blocks = blocks_of(known, rows * per_row, seed)
    out = torch.full((rows, per_row * known.block_size), 7.0)
    with np.errstate(all="ignore"):
        dequantize_into(memoryview(blocks.tobytes()), known.stored, out)
    assert np.array_equal(out.numpy(), oracle(blocks, known).reshape(out.shape), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_tensors_are_decoded_in_chunks(dtype: torch.dtype) -> None:
    known, width = BY_STORED["Q4_1"], 96
    rows = 2 * CHUNK_ELEMENTS // width + 5
    values = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    out = torch.empty(rows, width, dtype=dtype)
    dequantize_into(memoryview(packed.tobytes()), "Q4_1", out)
    assert torch.equal(out, torch.from_numpy(oracle(packed.reshape(-1, known.block_bytes), known)).view(rows, width).to(dtype))


def piece_of(name: str, values: torch.Tensor, kind: str) -> WeightPiece:
    """`values` as the loader would deliver them when stored as `kind`."""
    if kind in ("float32", "float16", "bfloat16"):
        return WeightPiece(name, kind, tuple(values.shape), values.to(getattr(torch, kind)))
    packed = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind])
    return WeightPiece(name, kind, tuple(values.shape), memoryview(packed.tobytes()))


def value_of(piece: WeightPiece) -> torch.Tensor:
    if isinstance(piece.data, torch.Tensor):
        return piece.data.float()
    known = BY_STORED[piece.stored]
    return torch.from_numpy(oracle(np.frombuffer(piece.data, np.uint8).reshape(-1, known.block_bytes), known)).view(piece.shape)


def merged_layer() -> tuple[LinearLayer, list[WeightPiece]]:
    torch.manual_seed(0)
    kinds = {"q": ("Q4_1", 64), "k": ("float16", 32), "v": ("Q8_0", 32)}
    parts, pieces, row = [], [], 0
    for name, (kind, rows) in kinds.items():
        parts.append(Part(name, (row, row + rows), (rows, 64)))
        pieces.append(piece_of(name, torch.randn(rows, 64), kind))
        row += rows
    return LinearLayer("layers.0.qkv", 64, row, tuple(parts)), pieces


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_linear_of_different_types(dtype: str) -> None:
    layer, pieces = merged_layer()
    method = quantization(dtype).linear(layer)
    assert method is not None and method.declare() == []
    for piece in reversed(pieces):
        method.accept(piece)
    method.finish()
    expected = torch.cat([value_of(piece) for piece in pieces]).to(getattr(torch, dtype))
    assert torch.equal(method.dequantize(), expected.float())
    hidden_states = torch.randn(5, 64, dtype=expected.dtype)
    torch.testing.assert_close(method.bind({})(hidden_states), F.linear(hidden_states, expected))
    assert method.sizes().resident_bytes == expected.nbytes


def test_reload_reaches_the_callables() -> None:
    layer, pieces = merged_layer()
    method = quantization().linear(layer)
    for piece in pieces:
        method.accept(piece)
    method.finish()
    call = method.bind({})
    for piece in pieces:
        method.accept(piece_of(piece.name, torch.ones(piece.shape), piece.stored))
    method.finish()
    assert torch.allclose(call(torch.ones(1, 64)), torch.full((1, 128), 64.0), rtol=1e-3)  # float16 scales of ones


def test_pieces_that_do_not_fit_are_refused() -> None:
    layer, pieces = merged_layer()
    method = quantization().linear(layer)
    with pytest.raises(ModelError, match="did not deliver k, q, v"):
        method.finish()
    with pytest.raises(ModelError, match="no place for 'x'"):
        method.accept(piece_of("x", torch.ones(64, 64), "float32"))
    with pytest.raises(ModelError, match=r"shape \(32, 64\), layers.0.qkv expects \(64, 64\)"):
        method.accept(piece_of("q", torch.ones(32, 64), "Q4_0"))
    with pytest.raises(ModelError, match="no GGUF type"):
        method.accept(WeightPiece("q", "int4", (64, 64), memoryview(b"")))
    for piece in pieces[:2]:
        method.accept(piece)
    with pytest.raises(ModelError, match="did not deliver v"):
        method.finish()


def test_tied_embedding_looks_up_and_multiplies() -> None:
    torch.manual_seed(1)
    layer = EmbeddingLayer("embed", 70, 32, Part("table", (0, 64), (64, 32)), is_head=True)
    piece = piece_of("table", torch.randn(64, 32), "Q8_0")
    method = quantization().embedding(layer)
    method.accept(piece)
    method.finish()
    table = torch.cat([value_of(piece), torch.zeros(6, 32)])
    ids = torch.tensor([3, 0, 69, 3])
    assert torch.equal(method.bind({})(ids), table[ids])
    hidden_states = torch.randn(2, 32)
    assert method.sizes().resident_bytes == table.nbytes
    torch.testing.assert_close(method.bind_head({})(hidden_states), F.linear(hidden_states, table))


def test_leaves_the_kv_cache_and_experts_alone() -> None:
    assert quantization().kv_cache(None) is None
    assert quantization().experts(None) is None


def test_accepts_what_the_loader_delivers(write_gguf) -> None:
    path = write_gguf(types={"blk.0.ffn_up.weight": "Q4_0", "blk.0.ffn_gate.weight": "F16"})
    loader = GGUFLoader(None, WeightLoaderSetup())
    checkpoint = loader.describe(LocalFiles(path))
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    parts = tuple(Part(name, (64 * index, 64 * index + 64), (64, 32)) for index, name in enumerate(names))
    method = quantization().linear(LinearLayer("mlp", 32, 128, parts))
    for piece in loader.tensors(checkpoint, [WeightSlice(name) for name in names]):
        method.accept(piece)
    method.finish()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    expected = [gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in map(stored.get, FFN_NAMES)]
    assert np.array_equal(method.dequantize().numpy(), np.concatenate(expected))


FFN_NAMES = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")


@pytest.mark.real_model
def test_smollm2_layer_equals_the_package(smollm2_gguf: Path) -> None:
    loader = GGUFLoader(None, WeightLoaderSetup())
    checkpoint = loader.describe(LocalFiles(smollm2_gguf))
    for name in ("model.embed_tokens.weight", "model.layers.29.mlp.down_proj.weight", "model.layers.3.self_attn.q_proj.weight"):
        (piece,) = loader.tensors(checkpoint, [WeightSlice(name, 0, 64, 576)])
        rows, width = piece.shape
        method = quantization().linear(LinearLayer("layer", width, rows, (Part(name, (0, rows), (rows, width)),)))
        method.accept(piece)
        method.finish()
        assert torch.equal(method.dequantize(), value_of(piece))
