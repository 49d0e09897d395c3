"""A file that is rewritten in another block type is the same model with different rounding."""

from __future__ import annotations

import runpy
from pathlib import Path

import gguf
import numpy as np
import pytest

SCRIPT = runpy.run_path(str(Path(__file__).with_name("write_gguf.py")))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_token_list(["a", "ü", "<end>"])
    writer.add_token_types([1, 1, 3])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(0)
    for name, kind, shape in (
        ("token_embd.weight", "Q8_0", (3, 64)),
        ("blk.0.attn_norm.weight", "F32", (64,)),
        ("blk.0.ffn_up.weight", "Q4_1", (96, 64)),
        ("blk.0.ffn_down.weight", "F16", (64, 96)),
    ):
        values = random.standard_normal(shape).astype(np.float32)
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(
            name,
            values if kind == "F32" else gguf.quants.quantize(values, stored),
            raw_dtype=stored,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", SCRIPT["FILE_TYPES"])
def test_only_layer_matrices_change(source: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target.gguf"
    SCRIPT["write_as"](source, target, name)
    before = gguf.GGUFReader(source)
    after = gguf.GGUFReader(target)
    fields = {field.name: field.contents() for field in after.fields.values()}
    assert fields["general.file_type"] == SCRIPT["FILE_TYPES"][name]
    for field in before.fields.values():
        if field.name != "general.file_type":
            assert (
                fields[field.name] == field.contents()
                and after.fields[field.name].types == field.types
            )
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, list(old.shape)) == (new.name, list(new.shape))
        if old.name.startswith("blk.0.ffn"):
            assert new.tensor_type == gguf.GGMLQuantizationType[name]
            values = gguf.quants.dequantize(old.data, old.tensor_type)
            close = np.abs(gguf.quants.dequantize(new.data, new.tensor_type) - values)
            assert close.max() <= np.abs(values).max() / (6 if name.startswith("Q4") else 12)
        else:
            assert new.tensor_type == old.tensor_type and np.array_equal(new.data, old.data)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
