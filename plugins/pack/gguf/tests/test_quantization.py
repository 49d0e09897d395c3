from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pegboard_pack_gguf.dequantize import CHUNK_ELEMENTS, dequantize_into
from pegboard_pack_gguf.ggml_types import BY_STORED, GGML_TYPES, GGMLType
from pegboard_pack_gguf.loader import GGUFLoader
from pegboard_pack_gguf.options import GGUFOptions
from pegboard_pack_gguf.quantization import GGUFQuantization

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.quantization import (
    EmbeddingLayer,
    LinearLayer,
    Part,
    QuantizationSetup,
    RepackCache,
)
from pegboard.interfaces.weight_loader import (
    TensorEntry,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard.ops import REFERENCES
from pegboard.ops.blocks import BlockWeight
from pegboard.ops.float_codes import CodeWeight
from pegboard.ops.linear import FloatWeight
from pegboard_testing.held_memory import held_bytes
from pegboard_weights.composed import SideBySide

BLOCK_TYPES = [known for known in GGML_TYPES.values() if known.block_size > 1]


def quantization(dtype: str = "float32", compute: str = "native", **more: Any) -> GGUFQuantization:
    setup = QuantizationSetup(
        {"quant_method": "gguf"}, dtype, "cpu", **{"kernels": REFERENCES, **more}
    )
    return GGUFQuantization(GGUFOptions(compute=compute), setup)


def oracle(blocks: np.ndarray, known: GGMLType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[known.name]).astype(
            np.float32
        )


@pytest.mark.parametrize("known", BLOCK_TYPES, ids=lambda known: known.name)
def test_every_type_equals_the_package_bit_by_bit(
    known: GGMLType, random_blocks: Any, block_values: Any
) -> None:
    for seed, (rows, per_row) in enumerate([(1, 1), (2, 3), (40, 2)]):
        blocks = random_blocks(known.name, rows * per_row, seed)
        out = torch.full((rows, per_row * known.block_size), 7.0)
        with np.errstate(all="ignore"):
            dequantize_into(memoryview(blocks.tobytes()), known.stored, out)
        assert np.array_equal(
            out.numpy(), block_values(blocks, known.name).reshape(out.shape), equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_tensors_are_decoded_in_chunks(dtype: torch.dtype) -> None:
    known = BY_STORED["Q4_1"]
    width = 96
    rows = 2 * CHUNK_ELEMENTS // width + 5
    values = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    out = torch.empty(rows, width, dtype=dtype)
    dequantize_into(memoryview(packed.tobytes()), "Q4_1", out)
    assert torch.equal(
        out,
        torch.from_numpy(oracle(packed.reshape(-1, known.block_bytes), known))
        .view(rows, width)
        .to(dtype),
    )


def piece_of(name: str, values: torch.Tensor, kind: str) -> WeightPiece:
    """Returns `values` as the loader would deliver them when stored as `kind`."""
    if kind in ("float32", "float16", "bfloat16"):
        return WeightPiece(name, kind, tuple(values.shape), values.to(getattr(torch, kind)))
    packed = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[kind])
    return WeightPiece(name, kind, tuple(values.shape), memoryview(packed.tobytes()))


def value_of(piece: WeightPiece) -> torch.Tensor:
    if isinstance(piece.data, torch.Tensor):
        return piece.data.float()
    known = BY_STORED[piece.stored]
    return torch.from_numpy(
        oracle(np.frombuffer(piece.data, np.uint8).reshape(-1, known.block_bytes), known)
    ).view(piece.shape)


MIXED = ("Q4_1", "float16", "Q8_0")
IN_BLOCKS = ("Q4_1", "Q4_0", "Q8_0")


def linear(layer: LinearLayer, *arguments: str, **more: Any) -> Any:
    """Return the weight of a layer, which knows the tensors that it is read from."""
    weight = quantization(*arguments, **more).linear(layer)
    assert weight is not None and [wanted.name for wanted in weight.declare({})] == [
        part.name for part in layer.parts
    ]
    return weight


def merged_layer(stored: tuple[str, str, str] = IN_BLOCKS) -> tuple[LinearLayer, list[WeightPiece]]:
    torch.manual_seed(0)
    kinds = {"q": (stored[0], 64), "k": (stored[1], 32), "v": (stored[2], 32)}
    parts = []
    pieces = []
    row = 0
    for name, (kind, rows) in kinds.items():
        parts.append(Part(name, (row, row + rows)))
        pieces.append(piece_of(name, torch.randn(rows, 64), kind))
        row += rows
    return LinearLayer("layers.0.qkv", 64, row, tuple(parts)), pieces


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [MIXED, IN_BLOCKS], ids=" ".join)
@pytest.mark.parametrize("compute", ["native", "float"])
def test_merged_linear_of_different_types(
    dtype: str, stored: tuple[str, str, str], compute: str
) -> None:
    layer, pieces = merged_layer(stored)
    method = linear(layer, dtype, compute)
    for piece in reversed(pieces):
        method.accept(piece)
    method.finish()
    expected = torch.cat([value_of(piece) for piece in pieces]).to(getattr(torch, dtype))
    assert torch.equal(method.dequantize(), expected.float())
    hidden_states = torch.randn(5, 64, dtype=expected.dtype)
    torch.testing.assert_close(method.bind({})(hidden_states), F.linear(hidden_states, expected))
    assert held_bytes(method) == expected.nbytes


@pytest.mark.parametrize(
    ("stored", "compute", "held"),
    [
        (IN_BLOCKS, "native", BlockWeight),
        (MIXED, "native", SideBySide),
        (IN_BLOCKS, "float", FloatWeight),
        (("IQ4_NL", "Q8_0", "Q4_0"), "native", SideBySide),
        (("IQ4_NL", "MXFP4", "NVFP4"), "native", CodeWeight),
        (("IQ4_NL", "MXFP4", "NVFP4"), "float", FloatWeight),
    ],
)
def test_how_a_weight_is_held(stored: tuple[str, str, str], compute: str, held: type) -> None:
    """Parts of the same packed form are held together, and parts of other forms next to them,
    unless floats were requested."""
    layer, _ = merged_layer()
    method = linear(layer, "float32", compute)
    for part, kind in zip(layer.parts, stored, strict=True):
        data = memoryview(bytes(part.rows[1] * 64))
        rows = part.rows[1] - part.rows[0]
        if kind == "float16":
            method.accept(piece_of(part.name, torch.zeros(rows, 64), kind))
        else:
            method.accept(
                WeightPiece(
                    part.name, kind, (rows, 64), data[: rows * BY_STORED[kind].num_bytes(64)]
                )
            )
    method.finish()
    assert type(method.weight()) is held


def test_blocks_are_not_replaced_by_floats() -> None:
    layer, pieces = merged_layer()
    method = linear(layer)
    for piece in pieces:
        method.accept(piece)
    method.finish()
    for piece in pieces:
        method.accept(piece_of(piece.name, torch.ones(piece.shape), "float16"))
    with pytest.raises(ModelError, match="q comes in another form than it was first loaded in"):
        method.finish()


class KeptWeight(BlockWeight):
    """Keeps what it was given in a dict, like a native weight in the repack cache."""

    num_writes = 0

    def __init__(self, *arguments: Any, cache: Any = None, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.cache = cache

    def kept(self) -> dict[str, torch.Tensor]:
        if self.cache.cache.files is None:
            self.cache.cache.files = {}
        return self.cache.cache.files

    def restore(self) -> bool:
        kept = self.kept().get(json.dumps(self.cache.key))
        if kept is not None:
            self._float.plain().copy_(kept)
            super().finish()
        return kept is not None

    def write(self, start: int, blocks: Any) -> None:
        KeptWeight.num_writes += 1
        super().write(start, blocks)

    def finish(self) -> None:
        super().finish()
        self.kept()[json.dumps(self.cache.key)] = self.dense().clone()


def test_a_warm_start_decodes_nothing(tmp_path: Path) -> None:
    cache = RepackCache(tmp_path, "sha256:1", 1 << 20)
    kernels = {**REFERENCES, "block_weight": KeptWeight}

    def loaded(pieces: list[WeightPiece], layer: LinearLayer) -> Any:
        KeptWeight.num_writes = 0
        method = linear(layer, kernels=kernels, repack_cache=cache)
        for piece in pieces:
            method.accept(piece)
        method.finish()
        return method

    layer, pieces = merged_layer()
    first = loaded(pieces, layer)
    assert KeptWeight.num_writes == 3
    unread = [WeightPiece(p.name, p.stored, p.shape, memoryview(b"not read")) for p in pieces]
    second = loaded(unread, layer)
    assert KeptWeight.num_writes == 0 and torch.equal(second.dequantize(), first.dequantize())
    call = second.bind({})
    for piece in pieces:  # a reload is written, not restored
        second.accept(piece_of(piece.name, torch.ones(piece.shape), piece.stored))
    second.finish()
    assert torch.allclose(call(torch.ones(1, 64)), torch.full((1, 128), 64.0), rtol=1e-3)
    loaded(*reversed(merged_layer(("Q8_0", "Q4_0", "Q8_0"))))
    assert KeptWeight.num_writes == 3, "other stored types make a different weight"
    q, k, v = layer.parts
    loaded(pieces, replace(layer, parts=(q, replace(k, rows=v.rows), replace(v, rows=k.rows))))
    assert KeptWeight.num_writes == 3, "the same parts in other rows make a different weight"


@pytest.mark.parametrize("stored", [MIXED, IN_BLOCKS], ids=" ".join)
def test_reload_reaches_the_callables(stored: tuple[str, str, str]) -> None:
    layer, pieces = merged_layer(stored)
    method = linear(layer)
    for piece in pieces:
        method.accept(piece)
    method.finish()
    call = method.bind({})
    for piece in pieces:
        method.accept(piece_of(piece.name, torch.ones(piece.shape), piece.stored))
    method.finish()
    # float16 scales of ones
    assert torch.allclose(call(torch.ones(1, 64)), torch.full((1, 128), 64.0), rtol=1e-3)


def test_pieces_that_do_not_fit_are_refused() -> None:
    layer, pieces = merged_layer()
    method = linear(layer)
    with pytest.raises(ModelError, match="did not contain k, q, v"):
        method.finish()
    with pytest.raises(ModelError, match="no place for x"):
        method.accept(piece_of("x", torch.ones(64, 64), "float32"))
    for piece in pieces[:2]:
        method.accept(piece)
    with pytest.raises(ModelError, match="did not contain v"):
        method.finish()
    with pytest.raises(ModelError, match=r"shape \(32, 64\); layers.0.qkv expects \(64, 64\)"):
        method.accept(piece_of("q", torch.ones(32, 64), "Q4_0"))
    for piece in [WeightPiece("q", "int4", (64, 64), memoryview(b"")), *pieces[1:]]:
        method.accept(piece)
    with pytest.raises(ModelError, match="not a GGUF type"):
        method.finish()


@pytest.mark.parametrize("stored", ["Q8_0", "float16"])
def test_tied_embedding_looks_up_and_multiplies(stored: str) -> None:
    torch.manual_seed(1)
    layer = EmbeddingLayer("embed", 70, 32, Part("table", (0, 64)), is_head=True)
    piece = piece_of("table", torch.randn(64, 32), stored)
    method = quantization().embedding(layer)
    assert method is not None
    method.declare({})
    method.accept(piece)
    method.finish()
    table = torch.cat([value_of(piece), torch.zeros(6, 32)])
    ids = torch.tensor([3, 0, 69, 3])
    assert torch.equal(method.bind({})(ids), table[ids])
    hidden_states = torch.randn(2, 32)
    assert held_bytes(method) == table.nbytes
    torch.testing.assert_close(method.bind_head({})(hidden_states), F.linear(hidden_states, table))


def test_the_kv_cache_is_half_precision_whatever_kernels_compute() -> None:
    assert quantization().kv_cache(None) == "float16"
    assert quantization(compute="float").kv_cache(None) is None
    assert quantization("bfloat16").kv_cache(None) is None, "which is as small"


def test_accepts_what_the_loader_delivers(write_gguf: Any) -> None:
    path = write_gguf(types={"blk.0.ffn_up.weight": "Q4_0", "blk.0.ffn_gate.weight": "F16"})
    loader = GGUFLoader(None, WeightLoaderSetup())
    checkpoint = loader.describe(LocalFiles(path))
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    parts = tuple(Part(name, (64 * index, 64 * index + 64)) for index, name in enumerate(names))
    method = linear(LinearLayer("mlp", 32, 128, parts))
    for piece in loader.tensors(checkpoint, [WantedWeight(name) for name in names]):
        method.accept(piece)
    method.finish()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    expected = [
        gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in map(stored.get, FFN_NAMES)
    ]
    assert np.array_equal(method.dequantize().numpy(), np.concatenate(expected))


FFN_NAMES = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")


@pytest.mark.real_model
def test_smollm2_layer_equals_the_package(smollm2_gguf: Path) -> None:
    loader = GGUFLoader(None, WeightLoaderSetup())
    checkpoint = loader.describe(LocalFiles(smollm2_gguf))
    for name in (
        "model.embed_tokens.weight",
        "model.layers.29.mlp.down_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
    ):
        (piece,) = loader.tensors(checkpoint, [WantedWeight(name)])
        rows, width = piece.shape
        method = linear(LinearLayer("layer", width, rows, (Part(name, (0, rows)),)))
        method.accept(piece)
        method.finish()
        assert torch.equal(method.dequantize(), value_of(piece))


@pytest.mark.parametrize("compute", ["native", "float"])
def test_a_factor_next_to_the_weight(random_blocks: Any, block_values: Any, compute: str) -> None:
    """NVFP4 has a scale of the whole matrix, in a tensor of its own."""
    blocks = random_blocks("NVFP4", 6, 0)
    layer = LinearLayer("layer", 128, 3, (Part("layer.weight", (0, 3)),))
    weight = quantization(compute=compute).linear(layer)
    assert weight is not None
    index = {"layer.scale": TensorEntry("layer.scale", (1,), "float32", "f", 0, 4)}
    assert [wanted.name for wanted in weight.declare(index)] == ["layer.weight", "layer.scale"]
    weight.accept(WeightPiece("layer.weight", "NVFP4", (3, 128), memoryview(blocks.tobytes())))
    weight.accept(WeightPiece("layer.scale", "float32", (1,), torch.tensor([0.375])))
    weight.finish()
    expected = block_values(blocks, "NVFP4").reshape(3, 128) * np.float32(0.375)
    assert np.allclose(weight.dequantize().numpy(), expected, rtol=1e-6)
