"""LoRA adapters in GGUF change a model as the same adapters of PEFT do, whatever the format of the
base model."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from pegboard_pack_gguf.adapters import read_adapter

from pegboard.data.request import LoRARequest
from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard.layers import Linear
from pegboard.layers.build import LoRALimits
from pegboard.plugins.registry import Registry
from pegboard.worker.adapters import Adapters, read_files
from pegboard_testing.fake_build import adapter_product, fake_build, load_layers

HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
WIDTH = 32
RANK = 2
ALPHA = 8.0
ROWS = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
GGUF_NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"}
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}


def base(rope_style: Any = "halves") -> Checkpoint:
    return Checkpoint(
        format="f",
        path=Path("f"),
        config=CONFIG,
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("hf"),
        rope_style=rope_style,
    )


def in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Permutes rows as converters of Llama do."""
    return values.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(values.shape)


@pytest.fixture
def matrices() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of each module, with rows as on Hugging Face."""
    random = np.random.default_rng(0)
    return {
        name: (
            random.standard_normal((RANK, WIDTH)).astype(np.float32),
            random.standard_normal((rows, RANK)).astype(np.float32),
        )
        for name, rows in ROWS.items()
    }


def write(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    arch: str = "llama",
    kind: str = "F32",
    **metadata: str | float,
) -> Path:
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / "adapter.gguf", arch)
    values = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": ALPHA,
    } | metadata
    for key, value in values.items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_string(
            key, value
        )
    for name, data in tensors.items():
        number = gguf.GGMLQuantizationType[kind if data.shape[-1] % 32 == 0 else "F32"]
        writer.add_tensor(
            name, gguf.quants.quantize(np.ascontiguousarray(data), number), raw_dtype=number
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def as_gguf(
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], is_permuted: bool
) -> dict[str, np.ndarray]:
    tensors = {}
    for name, (a, b) in matrices.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name)
        tensors[f"blk.0.{GGUF_NAMES[name]}.weight.lora_a"] = a
        tensors[f"blk.0.{GGUF_NAMES[name]}.weight.lora_b"] = (
            in_pairs(b, heads) if is_permuted and heads else b
        )
    return tensors


def loaded(folder: Path, checkpoint: Checkpoint) -> tuple[str | None, torch.Tensor]:
    """Load the adapter as a worker does. Returns why it is not possible, and what it adds to the
    merged weight."""
    build = fake_build(lora=LoRALimits(1, 4, "float32"), lora_rows=lambda: None).at(
        "model.layers.0.self_attn"
    )
    layer = Linear(build, WIDTH, sum(ROWS.values()), parts=ROWS)
    load_layers(
        [layer],
        {f"{build.path}.{name}.weight": torch.zeros(rows, WIDTH) for name, rows in ROWS.items()},
    )
    adapters = Adapters([layer], partial(read_files, Registry.discover(), checkpoint))
    while (answer := adapters.read(1, LoRARequest("poet", 1, str(folder)))) is None:
        time.sleep(0.001)
    digest, reason = answer
    if digest:
        adapters.load(1, 1)
    adapters.close()
    assert layer.adapters is not None
    return reason or None, adapter_product(layer.adapters, 1)


@pytest.mark.parametrize("rope_style", ["halves", "pairs"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_any_adapter_on_any_base(matrices: Any, tmp_path: Path, arch: str, rope_style: str) -> None:
    """A file of Llama has permuted rows, whether the base model has them or not. Nothing else is
    permuted."""
    expected = [b @ a * (ALPHA / RANK) for a, b in matrices.values()]
    if arch == "llama" and rope_style == "pairs":
        expected = [in_pairs(expected[0], HEADS), in_pairs(expected[1], KV_HEADS), expected[2]]
    reason, found = loaded(
        write(tmp_path, as_gguf(matrices, arch == "llama"), arch), base(rope_style)
    )
    assert reason is None
    torch.testing.assert_close(found, torch.from_numpy(np.concatenate(expected)))


def test_peft_and_gguf_are_the_same_adapter(matrices: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text(f'{{"r": {RANK}, "lora_alpha": {ALPHA}}}')
    names = {
        f"base_model.model.model.layers.0.self_attn.{name}.lora_{end}.weight": torch.from_numpy(
            value
        )
        for name, pair in matrices.items()
        for end, value in zip("AB", pair, strict=True)
    }
    save_file(names, peft / "adapter_model.safetensors")
    other = write(tmp_path / "gguf", as_gguf(matrices, is_permuted=True))
    for rope_style in ("halves", "pairs"):
        (no_reason, first), (also_none, second) = (
            loaded(folder, base(rope_style)) for folder in (peft, other)
        )
        assert no_reason is None and also_none is None
        torch.testing.assert_close(first, second)


def test_architectures_whose_rows_are_moved_back(matrices: Any, tmp_path: Path) -> None:
    """Granite is permuted in its files, but not in the model, whatever the format of the base."""
    _, found = read_adapter(write(tmp_path, as_gguf(matrices, is_permuted=True), "granite"), base())
    for name, (_, b) in matrices.items():
        torch.testing.assert_close(
            found[f"model.layers.0.self_attn.{name}"][1], torch.from_numpy(b * (ALPHA / RANK))
        )


def test_merged_and_quantized_matrices(matrices: Any, tmp_path: Path) -> None:
    a = matrices["q_proj"][0]
    merged = np.concatenate([b for _, b in matrices.values()])
    tensors = {"blk.0.attn_qkv.weight.lora_a": a, "blk.0.attn_qkv.weight.lora_b": merged}
    _, found = read_adapter(write(tmp_path, tensors, "qwen2", "Q8_0"), base())
    packed = gguf.quants.quantize(a, gguf.GGMLQuantizationType.Q8_0)
    for name, (_, b) in matrices.items():
        pair = found[f"model.layers.0.self_attn.{name}"]
        assert np.array_equal(
            pair[0].numpy(), gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        )
        torch.testing.assert_close(pair[1], torch.from_numpy(b * (ALPHA / RANK)))


A = "blk.0.attn_q.weight.lora_a"
B = "blk.0.attn_q.weight.lora_b"
GOOD = {A: np.ones((2, 32), np.float32), B: np.ones((32, 2), np.float32)}


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        (GOOD, {"general.type": "model"}, "is not a LoRA adapter: general.type is 'model'"),
        (GOOD, {"adapter.type": "dora"}, "adapter.type is 'dora'"),
        (GOOD, {"adapter.lora.alpha": float("nan")}, "expected a positive number"),
        (GOOD, {"adapter.alora.invocation_tokens": "x"}, "aLoRA"),
        (GOOD, {"arch": "rwkv7"}, "architecture 'rwkv7', which is not supported"),
        ({A: GOOD[A]}, {}, "lacks lora_b"),
        ({B: GOOD[B]}, {}, "lacks lora_a"),
        ({**GOOD, A: np.ones((3, 32), np.float32)}, {}, "the ranks of .* differ: 3 and 2"),
        (
            {**GOOD, "blk.0.attn_norm.weight": np.ones((32, 1), np.float32)},
            {},
            "attn_norm.weight.* is not supported",
        ),
        ({**GOOD, "blk.0.teapot.weight.lora_a": GOOD[A]}, {}, "teapot.* is not supported"),
        ({**GOOD, A: np.ones((2, 2, 32), np.float32)}, {}, "is not supported"),
        ({A: GOOD[A], B: np.ones((30, 2), np.float32)}, {}, "cannot be divided into 8 equal parts"),
        (
            {"blk.9.attn_q.weight.lora_a": GOOD[A], "blk.9.attn_q.weight.lora_b": GOOD[B]},
            {},
            "does not have: model.layers.9",
        ),
    ],
)
def test_a_bad_adapter_is_an_error_that_names_it(
    tmp_path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, Any], words: str
) -> None:
    folder = write(tmp_path, tensors, **metadata)
    reason, _ = loaded(folder, base())
    assert reason is not None and re.search(words, reason), reason


def test_a_folder_has_one_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has 0 GGUF files"):
        read_adapter(tmp_path, base())
    write(tmp_path, GOOD)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="has 2 GGUF files"):
        read_adapter(tmp_path, base())


def test_a_cut_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD) / "adapter.gguf"
    content = path.read_bytes()
    for length in range(0, len(content), 37):
        path.write_bytes(content[:length])
        reason, _ = loaded(tmp_path, base())
        assert reason is not None and str(path) in reason
