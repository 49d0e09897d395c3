"""Small GGUF files for the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

Writer = Callable[..., Path]
HIDDEN_SCALES = {"MXFP4": (slice(0, 1), 0x7F), "NVFP4": (slice(0, 4), 0x3F)}
"""Bytes of a block, and the bits that are used of them in the tests. The types of torch and ggml
differ for codes above."""
VOCAB = 64
HIDDEN = 32
FFN = 64
HEADS = 4
KV_HEADS = 2
LAYERS = 2
HEAD_DIM = HIDDEN // HEADS


def random_blocks(name: str, num_blocks: int, seed: int) -> np.ndarray:
    """Random bytes: any bit pattern is a block, with all possible scales, including infinite ones
    and NaN."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    blocks = np.random.default_rng(seed).integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    if name in HIDDEN_SCALES:
        where, mask = HIDDEN_SCALES[name]
        blocks[:, where] &= mask
    return blocks


def block_values(blocks: np.ndarray, name: str) -> np.ndarray:
    """Returns what the package says that blocks hold, or for types that it cannot decode, what the
    format says: [n, block] float32."""
    with np.errstate(all="ignore"):
        if name == "Q8_K":
            return blocks[:, 4:260].view(np.int8) * blocks[:, :4].copy().view(np.float32)
        if name == "Q1_0":
            bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
            return (2 * bits - 1) * blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).astype(np.float32)


def metadata_of(arch: str) -> dict[str, Any]:
    """The metadata that every architecture has."""
    return {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 20000.0,
    }


def tensors_of(arch: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random float32 tensors of a two-layer model by GGUF names. The head is tied."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    tensors = {"token_embd.weight": normal(VOCAB, HIDDEN), "output_norm.weight": normal(HIDDEN)}
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        tensors |= {
            f"{name}attn_norm.weight": normal(HIDDEN),
            f"{name}attn_q.weight": normal(HIDDEN, HIDDEN),
            f"{name}attn_k.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}attn_v.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}attn_output.weight": normal(HIDDEN, HIDDEN),
            f"{name}ffn_norm.weight": normal(HIDDEN),
            f"{name}ffn_gate.weight": normal(FFN, HIDDEN),
            f"{name}ffn_up.weight": normal(FFN, HIDDEN),
            f"{name}ffn_down.weight": normal(HIDDEN, FFN),
        }
        if arch == "qwen2":
            tensors |= {
                f"{name}attn_{part}.bias": normal(rows)
                for part, rows in (("q", 32), ("k", 16), ("v", 16))
            }
        if arch == "qwen3":
            tensors |= {
                f"{name}attn_q_norm.weight": normal(HEAD_DIM),
                f"{name}attn_k_norm.weight": normal(HEAD_DIM),
            }
    return tensors


def write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


@pytest.fixture(name="random_blocks")
def random_blocks_fixture() -> Callable[[str, int, int], np.ndarray]:
    return random_blocks


@pytest.fixture(name="block_values")
def block_values_fixture() -> Callable[[np.ndarray, str], np.ndarray]:
    return block_values


@pytest.fixture
def write_gguf(tmp_path: Path) -> Writer:
    """write_gguf(arch, tensors=…, types={name: "Q4_1"}, metadata=…) writes a file and returns its
    path. Metadata keys without a known prefix get the architecture's prefix."""

    def write(
        arch: str = "llama",
        *,
        tensors: dict[str, np.ndarray] | None = None,
        types: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        for key, value in {**metadata_of(arch), **(metadata or {})}.items():
            full = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{arch}.{key}"
            write_value(writer, full, value)
        for tensor_name, values in (tensors_of(arch) if tensors is None else tensors).items():
            kind = gguf.GGMLQuantizationType[(types or {}).get(tensor_name, "F32")]
            data = (
                values
                if kind == gguf.GGMLQuantizationType.F32
                else gguf.quants.quantize(values, kind)
            )
            writer.add_tensor(tensor_name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
