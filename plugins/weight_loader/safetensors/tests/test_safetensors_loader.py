"""The safetensors loader: what it describes, delivers and refuses."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_weight_loader_safetensors.loader import SafetensorsLoader
from safetensors.torch import save_file

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import WantedWeight, WeightLoaderSetup
from pegboard_weights.safetensors_header import read_header

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "dtype": "float32",
}
LOADER = SafetensorsLoader(None, WeightLoaderSetup())


def write_model(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, object] = CONFIG
) -> LocalFiles:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return LocalFiles(directory)


def write_shards(
    directory: Path,
    shards: dict[str, dict[str, torch.Tensor]],
    weight_map: dict[str, str] | None = None,
) -> LocalFiles:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    names = weight_map or {name: file for file, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return LocalFiles(directory)


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.randn(6, 4),
        "b.weight": torch.randn(3, 5).to(torch.bfloat16),
        "c.bias": torch.arange(7, dtype=torch.int32),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }


def test_whole_tensors_arrive_once_in_file_order(tmp_path: Path) -> None:
    stored = some_tensors()
    checkpoint = LOADER.describe(write_model(tmp_path, stored))
    assert set(checkpoint.tensors) == set(stored)
    wanted = [WantedWeight(name) for name in sorted(stored, reverse=True)] * 2
    pieces = list(LOADER.tensors(checkpoint, wanted))
    assert sorted(piece.name for piece in pieces) == sorted(stored)
    offsets = [checkpoint.tensors[piece.name].offset for piece in pieces]
    assert offsets == sorted(offsets)
    for piece in pieces:
        assert torch.equal(piece.data, stored[piece.name])
        assert piece.stored == str(stored[piece.name].dtype).removeprefix("torch.")
        assert piece.shape == tuple(stored[piece.name].shape)


def test_shards_are_read_by_index(tmp_path: Path) -> None:
    shards = {
        "x-2.safetensors": {"a": torch.randn(2, 2)},
        "x-1.safetensors": {"b": torch.randn(3), "c": torch.randn(1)},
    }
    checkpoint = LOADER.describe(write_shards(tmp_path, shards))
    pieces = {
        piece.name: piece.data
        for piece in LOADER.tensors(checkpoint, [WantedWeight("a"), WantedWeight("b")])
    }
    assert torch.equal(pieces["a"], shards["x-2.safetensors"]["a"])
    assert torch.equal(pieces["b"], shards["x-1.safetensors"]["b"])


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "x.bin"],
)
def test_index_may_not_leave_the_directory(tmp_path: Path, file: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    files = write_shards(tmp_path / "model", {"y.safetensors": {"b": torch.ones(1)}}, {"a": file})
    with pytest.raises(ModelError, match="expected a .safetensors file next to the index"):
        LOADER.describe(files)


def test_missing_shard_and_missing_tensor_are_named(tmp_path: Path) -> None:
    files = write_shards(
        tmp_path / "1",
        {"y.safetensors": {"b": torch.ones(1)}},
        {"b": "y.safetensors", "a": "z.safetensors"},
    )
    with pytest.raises(ModelError, match=r"z\.safetensors, which is missing"):
        LOADER.describe(files)
    files = write_shards(
        tmp_path / "2", {"y.safetensors": {"b": torch.ones(1)}}, {"a": "y.safetensors"}
    )
    with pytest.raises(ModelError, match="which does not contain it"):
        LOADER.describe(files)
    checkpoint = LOADER.describe(write_model(tmp_path / "3", {"a": torch.ones(1)}))
    with pytest.raises(ModelError, match="no tensor 'lm_head.weight'"):
        list(LOADER.tensors(checkpoint, [WantedWeight("lm_head.weight")]))


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="contains no weights"):
        LOADER.describe(LocalFiles(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        ModelError, match=r"pickled weights \(pytorch_model\.bin\).*--load-format pt"
    ):
        LOADER.describe(LocalFiles(tmp_path))


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400))
def test_every_truncation_is_noticed(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    directory = tmp_path_factory.mktemp("m")
    files = write_model(directory, {"a": torch.randn(4, 4), "b": torch.randn(9)})
    path = directory / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: min(cut, len(data) - 1)])
    with pytest.raises(ModelError):
        LOADER.describe(files)


def raw_file(path: Path, header: object, data: bytes = b"\0" * 64) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.mark.parametrize(
    "header",
    [
        ["list"],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}},
        {"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
    ],
)
def test_inconsistent_headers_are_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(ModelError):
        read_header(raw_file(tmp_path / "x.safetensors", header))


def test_huge_header_length_is_refused_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(ModelError, match="header"):
        read_header(path)


def test_the_quantization_config_in_a_file_of_its_own(tmp_path: Path) -> None:
    written = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    files = write_model(tmp_path, {"w": torch.ones(1)}, {})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    assert LOADER.describe(files).quantization == {"quant_method": "modelopt", **written}
    files = write_model(
        tmp_path, {"w": torch.ones(1)}, {"quantization_config": {"quant_method": "gptq"}}
    )
    assert LOADER.describe(files).quantization == {"quant_method": "gptq"}, "config.json wins"


FIRST_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
FIRST_GPTQ = {"bits": 4, "group_size": 128, "desc_act": True, "sym": True}


@pytest.mark.parametrize(
    ("name", "written", "method"),
    [
        ("quant_config.json", FIRST_AWQ, "awq"),
        ("quantize_config.json", FIRST_AWQ, "awq"),
        ("quantize_config.json", FIRST_GPTQ, "gptq"),
        ("quantize_config.json", {**FIRST_GPTQ, "quant_method": "other"}, "other"),
    ],
)
def test_the_files_of_the_first_quantized_checkpoints(
    tmp_path: Path, name: str, written: dict[str, object], method: str
) -> None:
    files = write_model(tmp_path, {"w": torch.ones(1)}, {})
    (tmp_path / name).write_text(json.dumps(written))
    assert LOADER.describe(files).quantization == {**written, "quant_method": method}


def test_description(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"dtype": "bfloat16"},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    files = write_model(tmp_path, {"w": torch.ones(1)}, config)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "tool", "template": "T"},
                    {"name": "default", "template": "D"},
                ]
            }
        )
    )
    checkpoint = LOADER.describe(files)
    assert checkpoint.config == config
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.quantization == {"quant_method": "gptq", "bits": 4}
    assert checkpoint.generation_config == {"temperature": 0.5}
    assert checkpoint.chat_template == "D"
    assert (checkpoint.tokenizer.format, checkpoint.tokenizer.directory) == ("hf", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("J")
    assert LOADER.describe(files).chat_template == "J"


def test_a_whole_of_several_models(tmp_path: Path) -> None:
    """The text_config is that of the thinker, with what is said beside it."""
    text = {"vocab_size": 9, "eos_token_id": None, "dtype": "float16"}
    thinker = {"text_config": text, "eos_token_id": 3, "dtype": "bfloat16"}
    config = {"architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    checkpoint = LOADER.describe(write_model(tmp_path, {"w": torch.ones(1)}, config))
    assert checkpoint.config == {**config, "text_config": {**text, "eos_token_id": 3}}
    assert checkpoint.dtype == "float16"


@pytest.mark.parametrize("name", ["llm_config", "language_config"])
def test_other_names_of_a_text_config(tmp_path: Path, name: str) -> None:
    text = {"vocab_size": 9}
    config = {"architectures": ["InternVLChatModel"], name: text, "torch_dtype": "float16"}
    checkpoint = LOADER.describe(write_model(tmp_path, {"w": torch.ones(1)}, config))
    assert checkpoint.config == {**config, "text_config": text}
    assert checkpoint.dtype == "float16"


def test_the_architecture_of_a_config_that_names_none(tmp_path: Path) -> None:
    """Published configs of DeepSeek-VL2."""
    for name, expected in (("deepseek_vl_v2", ("DeepseekVLV2ForCausalLM",)), ("llama", ())):
        folder = write_model(tmp_path, {"w": torch.ones(1)}, {"model_type": name})
        assert LOADER.describe(folder).architectures == expected


def test_main_type_is_taken_from_the_weights_when_the_config_is_silent(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(9, dtype=torch.bfloat16),
        "b": torch.ones(2),
        "q": torch.ones(99, dtype=torch.int32),
    }
    checkpoint = LOADER.describe(write_model(tmp_path, tensors, {"architectures": ["X"]}))
    assert checkpoint.dtype == "bfloat16"


def test_digest_changes_with_the_weights(tmp_path: Path) -> None:
    first = LOADER.describe(write_model(tmp_path, {"a": torch.ones(4)})).digest
    assert LOADER.describe(LocalFiles(tmp_path)).digest == first
    assert LOADER.describe(write_model(tmp_path, {"a": torch.ones(5)})).digest != first


@pytest.mark.parametrize(
    "config", ["no json", "[1]", '{"architectures": "X"}', '{"architectures": [1]}']
)
def test_bad_configs_are_model_errors(tmp_path: Path, config: str) -> None:
    files = write_model(tmp_path, {"a": torch.ones(1)})
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError):
        LOADER.describe(files)


def test_describe_does_not_import_torch(tmp_path: Path) -> None:
    write_model(tmp_path, {"a": torch.ones(1)})
    code = (
        "import sys; from pathlib import Path\n"
        "from pegboard.interfaces.model_source import LocalFiles\n"
        "from pegboard.interfaces.weight_loader import WeightLoaderSetup\n"
        "from pegboard_weight_loader_safetensors.loader import SafetensorsLoader\n"
        "from pegboard_weight_loader_safetensors.dummy import DummyLoader\n"
        "for loader in (SafetensorsLoader, DummyLoader):\n"
        f"    loader(None, WeightLoaderSetup()).describe(LocalFiles(Path({str(tmp_path)!r})))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
