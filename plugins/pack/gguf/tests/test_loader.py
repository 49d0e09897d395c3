from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from pegboard_pack_gguf.loader import GGUFLoader
from pegboard_pack_gguf.options import GGUFFiles
from pegboard_pack_gguf.rope_scaling import divisors_config

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.weight_loader import Checkpoint, WantedWeight, WeightLoaderSetup

LOADER = GGUFLoader(None, WeightLoaderSetup())


def describe(path: Path) -> Checkpoint:
    return LOADER.describe(LocalFiles(path))


def stored_values(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a float32 file as the gguf package reads them."""
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
    "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
    "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
    "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
    "blk.1.ffn_gate.weight": "model.layers.1.mlp.gate_proj.weight",
    "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    "blk.1.attn_q.bias": "model.layers.1.self_attn.q_proj.bias",
    "blk.1.attn_q_norm.weight": "model.layers.1.self_attn.q_norm.weight",
    "blk.1.attn_k_norm.weight": "model.layers.1.self_attn.k_norm.weight",
}


@pytest.mark.parametrize(
    ("arch", "class_name", "rope_style"),
    [
        ("llama", "LlamaForCausalLM", "pairs"),
        ("qwen2", "Qwen2ForCausalLM", "halves"),
        ("qwen3", "Qwen3ForCausalLM", "halves"),
    ],
)
def test_describes_and_streams(write_gguf, arch: str, class_name: str, rope_style: str) -> None:
    path = write_gguf(arch, metadata={"attention.key_length": 8, "tokenizer.ggml.eos_token_id": 2})
    found = describe(path)
    assert found.architectures == (class_name,)
    assert found.config["architectures"] == [class_name]
    assert found.config["model_type"] == arch
    assert found.rope_style == rope_style
    assert found.quantization == {"quant_method": "gguf"}
    assert found.dtype == "float32"
    expected = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {key: found.config[key] for key in expected} == expected
    assert "rope_scaling" not in found.config
    stored = stored_values(path)
    assert len(found.tensors) == len(stored)
    pieces = {
        piece.name: piece
        for piece in LOADER.tensors(found, [WantedWeight(name) for name in found.tensors])
    }
    for gguf_name, name in NAMES.items():
        if gguf_name in stored:
            assert np.array_equal(pieces[name].data.numpy(), stored[gguf_name]), gguf_name
            assert found.tensors[name].shape == stored[gguf_name].shape
    assert pickle.loads(pickle.dumps(found)) == found


def test_real_checkpoint_file_order_and_once(write_gguf) -> None:
    found = describe(write_gguf())
    names = list(found.tensors)
    got = [
        piece.name
        for piece in LOADER.tensors(found, [WantedWeight(name) for name in reversed(names)])
    ]
    assert got == sorted(names, key=lambda name: found.tensors[name].offset)


def test_untied_head_and_bias_flags(write_gguf) -> None:
    from_conftest = stored_values(write_gguf(name="first.gguf"))
    head = np.ones((64, 32), np.float32)
    path = write_gguf(
        tensors=from_conftest
        | {"output.weight": head, "blk.0.attn_q.bias": np.ones(32, np.float32)}
    )
    found = describe(path)
    assert not found.config["tie_word_embeddings"]
    assert found.config["attention_bias"]
    assert found.tensors["lm_head.weight"].shape == (64, 32)


def test_plain_tensors_come_in_their_type(write_gguf) -> None:
    found = describe(
        write_gguf(types={"blk.0.ffn_up.weight": "F16", "blk.0.ffn_gate.weight": "BF16"})
    )
    up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    pieces = {
        piece.name: piece.data for piece in LOADER.tensors(found, map(WantedWeight, (up, gate)))
    }
    assert (pieces[up].dtype, pieces[gate].dtype) == (torch.float16, torch.bfloat16)
    assert (found.tensors[up].stored, found.tensors[gate].stored) == ("float16", "bfloat16")


def test_blocks_come_as_they_are_stored(write_gguf) -> None:
    path = write_gguf(types={"blk.0.ffn_down.weight": "Q4_1"})
    found = describe(path)
    name = "model.layers.0.mlp.down_proj.weight"
    entry = found.tensors[name]
    (piece,) = LOADER.tensors(found, [WantedWeight(name)])
    assert isinstance(piece.data, memoryview) and piece.data.readonly
    assert (piece.stored, piece.shape, len(piece.data)) == ("Q4_1", (32, 64), 32 * 2 * 20)
    assert bytes(piece.data) == path.read_bytes()[entry.offset : entry.offset + entry.num_bytes]


def test_an_unknown_tensor_is_named(write_gguf) -> None:
    with pytest.raises(ModelError, match="no tensor 'x'"):
        list(LOADER.tensors(describe(write_gguf()), [WantedWeight("x")]))


def test_main_dtype_is_none_for_blocks(write_gguf) -> None:
    tensors = stored_values(write_gguf(name="plain.gguf"))
    assert (
        describe(
            write_gguf(types=dict.fromkeys((n for n in tensors if "norm" not in n), "Q8_0"))
        ).dtype
        is None
    )


def llama3_divisors(
    theta: float, head_dim: int, factor: float, low: float, high: float, context: int
) -> list[float]:
    """Returns the divisors as the converter writes them (implemented again here, frequency by
    frequency)."""
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * index / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return [float(np.float32(divisor)) for divisor in divisors]


@pytest.mark.parametrize(
    ("factor", "head_dim", "high"),
    [(8.0, 128, 4.0), (32.0, 64, 4.0), (32.0, 128, 4.0), (4.0, 128, 2.0)],
)
def test_llama3_scaling_is_recovered(factor: float, head_dim: int, high: float) -> None:
    found = divisors_config(
        llama3_divisors(500000.0, head_dim, factor, 1.0, high, 8192), 500000.0, head_dim
    )
    expected = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
    }
    assert found == {**expected, "original_max_position_embeddings": 8192}


def test_other_divisors_are_kept_as_they_are() -> None:
    divisors = [1.0, 3.0, 2.0, 5.0]
    found = divisors_config(divisors, 10000.0, 8)
    assert (
        found is not None and found["rope_type"] == "longrope" and found["long_factor"] == divisors
    )
    assert divisors_config([1.0] * 4, 10000.0, 8) is None


def test_rope_scaling_from_the_file(write_gguf) -> None:
    divisors = llama3_divisors(20000.0, 64, 8.0, 1.0, 4.0, 8192)
    tensors = stored_values(write_gguf(name="plain.gguf"))
    path = write_gguf(
        tensors=tensors | {"rope_freqs.weight": np.array(divisors, np.float32)},
        metadata={"attention.key_length": 64, "attention.value_length": 64},
    )
    assert describe(path).config["rope_scaling"]["rope_type"] == "llama3"
    assert "rope_freqs.weight" not in describe(path).tensors
    linear = describe(
        write_gguf(metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    )
    assert linear.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert describe(write_gguf(metadata=yarn)).config["rope_scaling"] == expected
    yarn |= {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.attn_factor": 2.0}
    expected |= {"beta_fast": 16.0, "attention_factor": 2 * (0.1 * np.log(4) + 1)}
    assert describe(write_gguf(metadata=yarn)).config["rope_scaling"] == expected
    with pytest.raises(ModelError, match="rope.scaling.type is 'magic'"):
        describe(write_gguf(metadata={"rope.scaling.type": "magic"}))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.head_count_kv": 3}, "does not divide 4 heads"),
        ({"block_count": 0}, "block_count is 0"),
        ({"attention.head_count": [4, 2]}, "differs between layers"),
        ({"embedding_length": 48}, "token_embd.weight is"),
        ({"block_count": 1}, "has no place in a LlamaForCausalLM of 1 layers"),
        ({"attention.layer_norm_rms_epsilon": "small"}, "expected a positive number"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_senseless_metadata(write_gguf, metadata: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe(write_gguf(metadata=metadata))


def test_senseless_numbers_of_other_architectures(write_gguf) -> None:
    with pytest.raises(
        ModelError,
        match=r"metadata xielu.alpha_p is None, expected a finite number for each of \d+ layers",
    ):
        describe(write_gguf("apertus"))
    with pytest.raises(
        ModelError, match=r"mpt.feed_forward_length is \d+, expected a multiple of embedding_length"
    ):
        describe(
            write_gguf(
                "mpt", metadata={"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 97}
            )
        )


def test_unknown_architecture_and_tensor(write_gguf) -> None:
    with pytest.raises(
        ModelError,
        match="architecture 'teapot' is not supported; supported are afmoe, apertus, arcee,",
    ):
        describe(write_gguf("teapot"))
    with pytest.raises(
        ModelError, match="architecture 'rwkv7' cannot be served: it has recurrent layers"
    ):
        describe(write_gguf("rwkv7"))
    with pytest.raises(ModelError, match="contains no model: its general.type is 'adapter'"):
        describe(write_gguf(metadata={"general.type": "adapter"}))
    with pytest.raises(
        ModelError, match="temperature_scale is set; .* Use a file of Mistral Small"
    ):
        describe(write_gguf("mistral3", metadata={"attention.temperature_scale": 0.1}))
    tensors = stored_values(write_gguf(name="plain.gguf"))
    with pytest.raises(ModelError, match="ssm_conv1d"):
        describe(write_gguf(tensors=tensors | {"blk.0.ssm_conv1d.weight": np.ones(4, np.float32)}))


def test_mistral_3(write_gguf) -> None:
    """Its tensors are those of Llama."""
    checkpoint = describe(write_gguf("mistral3"))
    assert checkpoint.architectures == ("LlamaForCausalLM",)
    assert checkpoint.rope_style == "pairs"
    with pytest.raises(ModelError, match="temperature_scale is set; .* Use a file of Mistral Sm"):
        describe(write_gguf("mistral3", metadata={"attention.temperature_scale": 0.1}))


def test_experts_become_tensors_of_their_own(write_gguf) -> None:
    tensors = {
        name: values
        for name, values in stored_values(write_gguf(name="plain.gguf")).items()
        if "ffn_gate" not in name
    }
    tensors = {
        name: values
        for name, values in tensors.items()
        if "ffn_up" not in name and "ffn_down" not in name
    }
    experts = np.random.default_rng(1).standard_normal((3, 64, 32)).astype(np.float32)
    for layer in (0, 1):
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = np.ones((3, 32), np.float32)
        for part in ("gate", "up", "down"):
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = (
                experts if part != "down" else experts.reshape(3, 32, 64)
            )
    found = describe(
        write_gguf(tensors=tensors, metadata={"expert_count": 3, "expert_used_count": 2})
    )
    assert found.architectures == ("MixtralForCausalLM",)
    assert (found.config["num_local_experts"], found.config["num_experts_per_tok"]) == (3, 2)
    (piece,) = LOADER.tensors(
        found, [WantedWeight("model.layers.1.block_sparse_moe.experts.2.w3.weight")]
    )
    assert np.array_equal(piece.data.numpy(), experts[2])


def test_gemma_norms_lose_the_one_that_was_added(write_gguf) -> None:
    path = write_gguf("gemma")
    found = describe(path)
    (piece,) = LOADER.tensors(found, [WantedWeight("model.norm.weight")])
    assert np.array_equal(piece.data.numpy(), stored_values(path)["output_norm.weight"] - 1)


def test_merged_queries_keys_and_values_are_taken_apart(write_gguf) -> None:
    tensors = stored_values(write_gguf("qwen2", name="plain.gguf"))
    for layer in (0, 1):
        for ending in ("weight", "bias"):
            parts = [
                tensors.pop(f"blk.{layer}.attn_{part}.{ending}", None) for part in ("q", "k", "v")
            ]
            if parts[0] is not None:
                tensors[f"blk.{layer}.attn_qkv.{ending}"] = np.concatenate(parts)
    path = write_gguf("qwen2", tensors=tensors, types={"blk.1.attn_qkv.weight": "Q8_0"})
    found = describe(path)
    plain = describe(path.with_name("plain.gguf"))
    names = list(plain.tensors)
    assert list(found.tensors) != names and set(found.tensors) == set(names)
    pieces = {piece.name: piece for piece in LOADER.tensors(found, map(WantedWeight, names))}
    for piece in LOADER.tensors(plain, map(WantedWeight, names)):
        other = pieces[piece.name]
        assert other.shape == piece.shape
        if other.stored == "float32":
            assert torch.equal(other.data, piece.data)
        else:
            packed = gguf.quants.quantize(piece.data.numpy(), gguf.GGMLQuantizationType.Q8_0)
            assert bytes(other.data) == packed.tobytes()
    with pytest.raises(ModelError, match="has 64 rows, expected 64 \\+ 16 \\+ 16"):
        describe(
            write_gguf(
                "qwen2",
                tensors=tensors,
                metadata={"attention.key_length": 16, "attention.head_count_kv": 1},
            )
        )


def test_experts_in_blocks_are_cut_between_experts(write_gguf) -> None:
    tensors = stored_values(write_gguf("qwen3", name="plain.gguf"))
    tensors["blk.0.ffn_up_exps.weight"] = np.arange(4 * 64 * 32, dtype=np.float32).reshape(
        4, 64, 32
    )
    metadata = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
    path = write_gguf(
        "qwen3moe", tensors=tensors, types={"blk.0.ffn_up_exps.weight": "Q8_0"}, metadata=metadata
    )
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(4)]
    pieces = list(LOADER.tensors(describe(path), [WantedWeight(name) for name in names]))
    assert [(piece.name, piece.stored, piece.shape) for piece in pieces] == [
        (name, "Q8_0", (64, 32)) for name in names
    ]
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    joined = np.concatenate([np.frombuffer(piece.data, np.uint8) for piece in pieces])
    assert joined.tobytes() in whole.tobytes() and len(joined) == 4 * 64 * 34


def test_split_files(write_gguf) -> None:
    tensors = stored_values(write_gguf(name="plain.gguf"))
    names = sorted(tensors)
    split = {"split.count": 2, "split.tensors.count": len(names)}
    first, second = (
        write_gguf(
            tensors={name: tensors[name] for name in names[index::2]},
            metadata={**split, "split.no": index},
            name=f"model-{index + 1:05}-of-00002.gguf",
        )
        for index in (0, 1)
    )
    first.with_name("plain.gguf").unlink()
    for root in (first, second, first.parent):
        found = describe(root)
        assert found.path == first
        pieces = {
            piece.name: piece
            for piece in LOADER.tensors(found, [WantedWeight(name) for name in found.tensors])
        }
        assert len(pieces) == len(tensors)
        for gguf_name, name in NAMES.items():
            if gguf_name in tensors:
                assert np.array_equal(pieces[name].data.numpy(), tensors[gguf_name])
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match="00002-of-00002.gguf is not part 2 of 2"):
        describe(first)
    write_gguf(tensors={}, metadata={**split, "split.no": 1}, name=second.name)
    with pytest.raises(ModelError, match=f"contain 10 tensors; {len(names)} were split"):
        describe(first)
    second.write_bytes(content)
    first.rename(first.with_name("other"))
    with pytest.raises(ModelError, match="cannot read the GGUF file .*00001-of-00002"):
        describe(second)
    first.with_name("other").rename(first)
    second.unlink()
    with pytest.raises(
        ModelError, match="first of 2 parts, and model-00002-of-00002.gguf is missing"
    ):
        describe(first)


def test_directories(write_gguf, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="contains no GGUF file"):
        describe(tmp_path)
    with pytest.raises(ModelError, match="no GGUF file or directory"):
        describe(tmp_path / "none")
    write_gguf(name="a.gguf")
    write_gguf(name="mmproj-a.gguf")
    alone = GGUFLoader(GGUFFiles(mmproj="none"), WeightLoaderSetup())
    assert alone.describe(LocalFiles(tmp_path)).path.name == "a.gguf"
    with pytest.raises(ModelError, match="mmproj-a.gguf is no tower for images or audio"):
        describe(tmp_path)
    write_gguf(name="b.gguf")
    with pytest.raises(ModelError, match="several models; name one of these files: a.gguf, b.gguf"):
        describe(tmp_path)


def test_digest_follows_the_file(write_gguf) -> None:
    first = describe(write_gguf()).digest
    assert describe(write_gguf(metadata={"context_length": 64})).digest != first
    path = write_gguf()
    known = LOADER.describe(LocalFiles(path, {"model.gguf": "sha256:1"})).digest
    path.touch()
    assert LOADER.describe(LocalFiles(path, {"model.gguf": "sha256:1"})).digest == known


def test_shrunken_file_is_noticed(write_gguf) -> None:
    path = write_gguf()
    found = describe(path)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match="has shrunk"):
        list(LOADER.tensors(found, [WantedWeight(name) for name in found.tensors]))


def test_describe_imports_no_torch(write_gguf) -> None:
    code = (
        "import sys; from pathlib import Path; from pegboard.interfaces.model_source import "
        "LocalFiles;from pegboard_pack_gguf.loader import GGUFLoader; GGUFLoader(None, "
        "None).describe(LocalFiles(Path(sys.argv[1])));print(sorted({'torch', 'numpy', 'gguf', "
        "'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(write_gguf())], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.real_model
def test_smollm2(smollm2_gguf: Path) -> None:
    found = describe(smollm2_gguf)
    assert found.architectures == ("LlamaForCausalLM",)
    assert found.config["tie_word_embeddings"] and found.config["rope_theta"] == 100000.0
    assert (found.dtype, found.rope_style, found.generation_config["eos_token_id"]) == (
        None,
        "pairs",
        [2, 0],
    )
    assert len(found.tensors) == 272
    assert found.chat_template is not None and "<|im_start|>" in found.chat_template
    sizes = {
        piece.name: len(piece.data)
        for piece in LOADER.tensors(found, [WantedWeight("model.embed_tokens.weight")])
    }
    assert sizes == {"model.embed_tokens.weight": 49152 * 576 // 32 * 34}
