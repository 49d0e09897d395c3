"""Adapters on disk: a good one is loaded, and for every damaged one the reason names it."""

from __future__ import annotations

import json
import re
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_weight_loader_safetensors.adapters import PREFIX, read_adapter
from safetensors.torch import save_file

from pegboard.data.request import LoRARequest
from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry, TokenizerPayload
from pegboard.layers import Linear
from pegboard.layers.build import LoRALimits
from pegboard.plugins.discovery import Scan
from pegboard.plugins.registry import Registry
from pegboard.worker.adapters import Adapters, read_files
from pegboard_testing.fake_build import adapter_product, fake_build, load_layers

CONFIG = {"r": 2, "lora_alpha": 4}
NAME = "base_model.model.m.lora_"
RANK_5 = {f"{NAME}A.weight": torch.ones(5, 4), f"{NAME}B.weight": torch.ones(3, 5)}
BASE = Checkpoint(
    format="f",
    path=Path("f"),
    config={},
    architectures=(),
    tensors={},
    tokenizer=TokenizerPayload("hf"),
)


def tensors(**changes: Any) -> dict[str, torch.Tensor]:
    return {f"{NAME}A.weight": torch.ones(2, 4), f"{NAME}B.weight": torch.ones(3, 2)} | changes


def write(folder: Path, config: Any = CONFIG, weights: Any = None) -> LoRARequest:
    if config is not None:
        (folder / "adapter_config.json").write_bytes(
            config if isinstance(config, bytes) else json.dumps(config).encode()
        )
    if isinstance(weights, bytes):
        (folder / "adapter_model.safetensors").write_bytes(weights)
    else:
        save_file(tensors() if weights is None else weights, folder / "adapter_model.safetensors")
    return LoRARequest("poet", 1, str(folder))


def linear() -> Linear:
    build = fake_build(lora=LoRALimits(1, 4, "float32"), lora_rows=lambda: None).at("m")
    layer = Linear(build, 4, 3)
    load_layers([layer], {"m.weight": torch.zeros(3, 4)})
    return layer


def load_adapter(
    layers: list[Linear], slot: int, adapter: LoRARequest, registry: Registry | None = None
) -> str | None:
    """Load an adapter into these layers as a worker does. Return why it is not possible."""
    adapters = Adapters(layers, partial(read_files, registry or Registry.discover(), BASE))
    while (answer := adapters.read(1, adapter)) is None:
        time.sleep(0.001)
    digest, reason = answer
    if digest:
        adapters.load(slot, 1)
    adapters.close()
    return reason or None


def test_without_a_loader_that_reads_adapters_there_is_a_reason(tmp_path: Path) -> None:
    reason = load_adapter([linear()], 1, write(tmp_path), Registry(Scan()))
    assert reason == f"no installed weight loader reads the adapter in {tmp_path}"


def test_a_good_adapter_is_scaled_by_alpha_over_rank(tmp_path: Path) -> None:
    layer = linear()
    assert load_adapter([layer], 1, write(tmp_path)) is None
    assert layer.adapters is not None
    torch.testing.assert_close(adapter_product(layer.adapters, 1), torch.full((3, 4), 4.0))
    load_adapter([layer], 1, write(tmp_path, CONFIG | {"use_rslora": True}))
    torch.testing.assert_close(
        adapter_product(layer.adapters, 1), torch.full((3, 4), 2 * 4 / 2**0.5)
    )


def test_rows_of_queries_and_keys_follow_the_order_of_the_base_model(tmp_path: Path) -> None:
    """A base model in GGUF stores the rows of a head in pairs: 0, 4, 1, 5, …"""
    b = torch.arange(16.0).view(16, 1)
    names = {
        f"base_model.model.m.{part}.lora_{end}.weight": value
        for part in ("q_proj", "k_proj", "v_proj")
        for end, value in (("A", torch.ones(1, 4)), ("B", b.clone()))
    }
    write(tmp_path, {"r": 1, "lora_alpha": 1}, names)
    base = replace(
        BASE, rope_style="pairs", config={"num_attention_heads": 2, "num_key_value_heads": 1}
    )
    _, found = read_adapter(tmp_path, base)
    assert found["m.q_proj"][1].flatten().tolist() == [
        0,
        4,
        1,
        5,
        2,
        6,
        3,
        7,
        8,
        12,
        9,
        13,
        10,
        14,
        11,
        15,
    ]
    assert found["m.k_proj"][1].flatten().tolist() == [
        row for pair in zip(range(8), range(8, 16), strict=True) for row in pair
    ]
    assert torch.equal(found["m.v_proj"][1], b)
    assert all(torch.equal(read_adapter(tmp_path, BASE)[1][name][1], b) for name in found)


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (b"{", None, "is not JSON"),
        (b"[" * 100_000, None, "is not JSON"),
        (b"\xff", None, "is not UTF-8 text"),
        ([], None, "a JSON list, expected an object"),
        ({}, None, "got None and None"),
        (CONFIG | {"r": 0}, None, "got 0 and 4"),
        (CONFIG | {"r": "2"}, None, "got '2' and 4"),
        (CONFIG | {"r": True}, None, "got True and 4"),
        (CONFIG | {"lora_alpha": None}, None, "got 2 and None"),
        (CONFIG | {"lora_alpha": float("nan")}, None, "got 2 and nan"),
        (CONFIG | {"lora_alpha": 10**400}, None, "`lora_alpha`"),
        (CONFIG, b"", "it has only 0 bytes"),
        (
            CONFIG,
            b"\xff" * 64,
            "begins with .* instead of the length of a header of .*; fetch it again",
        ),
        (
            CONFIG,
            b"version https://git-lfs.github.com/spec/v1\noid",
            "is a Git LFS pointer, not .*: run `git lfs pull` in",
        ),
        (CONFIG, (4).to_bytes(8, "little") + b"{{{{", "is damaged"),
        (CONFIG, {f"{NAME}A.weight": torch.ones(2, 4)}, "lora_B.weight is missing"),
        (CONFIG, {f"{NAME}B.weight": torch.ones(3, 2)}, "lora_A.weight is missing"),
        (
            CONFIG,
            tensors(**{f"{NAME}magnitude_vector": torch.ones(3)}),
            "magnitude_vector .* belongs to a DoRA adapter",
        ),
        (
            CONFIG,
            tensors(**{f"{NAME}A.weight": torch.ones(2, 5)}),
            r"shapes of m do not fit the model: A \[2, 5\], B \[3, 2\]",
        ),
        (
            CONFIG,
            tensors(**{f"{NAME}B.weight": torch.ones(3, 1)}),
            r"A of m has the shape \[2, 4\], and B has \[3, 1\]",
        ),
        (CONFIG, tensors(**{f"{NAME}A.weight": torch.ones(8)}), r"A of m has the shape \[8\]"),
        (CONFIG | {"r": 5}, RANK_5, "max_lora_rank=4"),
        (CONFIG, RANK_5, "the matrices of m have rank 5, and adapter_config.json says 2"),
        (
            CONFIG | {"rank_pattern": {"m": 3}, "r": 5},
            RANK_5,
            "have rank 5, and adapter_config.json says 3",
        ),
        (CONFIG, {}, "has no tensors"),
        (
            CONFIG,
            (2 << 30).to_bytes(8, "little") + b"{",
            "instead of the length of a header of at most",
        ),
        (
            CONFIG,
            tensors(**{f"{NAME}A.weight": torch.ones(2, 4, dtype=torch.int8)}),
            "lora_A.weight .int8. is not supported",
        ),
        (CONFIG, tensors(**{f"{NAME}A.weight": torch.full((2, 4), torch.nan)}), "not finite"),
        (CONFIG, tensors(**{f"{NAME}B.weight": torch.full((3, 2), torch.inf)}), "not finite"),
        (
            CONFIG,
            tensors(**{"base_model.model.m.weight": torch.ones(3, 4)}),
            "m.weight .* is a whole weight",
        ),
        (CONFIG, tensors(**{"base_model.model.m.bias": torch.ones(3)}), "change biases"),
        (CONFIG, {f"x{'/..' * 200}.lora_A.weight": torch.ones(2, 4)}, "is not supported"),
        (
            CONFIG,
            {f"../../m.lora_{part}.weight": torch.ones(2, 2) for part in "AB"},
            "does not have: ../../m",
        ),
        (CONFIG, tensors(**{f"{NAME}embedding_A": torch.ones(2, 4)}), "m has the matrix A twice"),
        (
            CONFIG,
            {f"mlp.experts.3.up_proj.lora_{part}.weight": torch.ones(2, 2) for part in "AB"},
            "does not have: mlp.experts.3.up_proj",
        ),
        (
            CONFIG,
            {f"mlp.experts.lora_{part}.weight": torch.ones(3, 3) for part in "AB"},
            "A of mlp.experts has 3 rows, which are not a multiple of the rank 2",
        ),
        (CONFIG | {"peft_type": "LOHA"}, None, "peft_type is 'LOHA'; only LORA"),
        (CONFIG | {"peft_type": ["LORA"]}, None, "only LORA"),
        (CONFIG | {"bias": "all"}, None, "bias is 'all': adapters that change biases"),
        (CONFIG | {"lora_bias": True}, None, "lora_bias is True"),
        (CONFIG | {"use_dora": True}, None, "use_dora is True: DoRA is not supported"),
        (
            CONFIG | {"modules_to_save": ["lm_head", "embed_tokens"]},
            None,
            r"modules_to_save is \['lm_head', 'embed_tokens'\]",
        ),
        (CONFIG | {"trainable_token_indices": [1]}, None, "new token embeddings"),
        (CONFIG | {"layer_replication": [[0, 4], [2, 5]]}, None, "repeated layers"),
        (CONFIG | {"alora_invocation_tokens": [1, 2]}, None, "aLoRA"),
        (
            CONFIG | {"init_lora_weights": "pissa_niter_4"},
            None,
            "fits only a base model that was changed",
        ),
        (CONFIG | {"use_rslora": "yes"}, None, "use_rslora is 'yes', expected true or false"),
        (
            CONFIG | {"alpha_pattern": ["m"]},
            None,
            "alpha_pattern is .*expected module names with numbers",
        ),
        (CONFIG | {"alpha_pattern": {"m": "8"}}, None, "expected module names with numbers"),
        (CONFIG | {"rank_pattern": {"m": 0}}, None, "rank_pattern is"),
        (
            CONFIG | {"alpha_pattern": {"(a+)+$": 8}},
            None,
            r"by the expression '\(a\+\)\+\$'; only plain names",
        ),
        (b" " * (2 << 20), None, "larger than 1048576 bytes"),
        (
            CONFIG,
            {name.replace(".m.", ".x."): tensor for name, tensor in tensors().items()},
            "does not have: x",
        ),
    ],
)
def test_a_bad_adapter_is_an_error_that_names_it(
    tmp_path: Path, config: Any, weights: Any, words: str
) -> None:
    reason = load_adapter([linear()], 1, write(tmp_path, config, weights))
    assert reason is not None and re.search(words, reason), reason


@pytest.mark.parametrize("path", ["/none", "a\0b", "x" * 5000, "org/name", "/dev/zero"])
def test_a_bad_path_is_an_error_that_names_the_adapter(path: str) -> None:
    reason = load_adapter([linear()], 1, LoRARequest("poet", 1, path))
    assert reason


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_never_raise(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapter = write(folder)
        for file in folder.iterdir():
            content = bytearray(file.read_bytes())
            for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
                content[at] = data.draw(st.integers(0, 255))
            file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        reason = load_adapter([linear()], 1, adapter)
        assert reason != ""


def test_a_pickle_is_named_and_never_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(
        ModelError, match="is missing; adapter_model.bin is a pickle, which is never read"
    ):
        read_adapter(tmp_path, BASE)


MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp.up_proj",
    "lm_head",
)


@pytest.mark.parametrize(
    ("alphas", "expected"),
    [
        ({"q_proj": 8}, [4, 4, 2, 2]),
        ({"self_attn.q_proj": 8, "lm_head": 1}, [4, 4, 2, 0.5]),
        ({"layers.1.self_attn.q_proj": 8}, [2, 4, 2, 2]),
        ({r"layers\.1\.self_attn\.q_proj": 8}, [2, 4, 2, 2]),
        ({"^model.layers.0.self_attn.q_proj": 8, "^q_proj": 100}, [4, 2, 2, 2]),
        ({r".*\.q_proj": 8, "layers.1.self_attn.q_proj": 100}, [4, 4, 2, 2]),
        ({"proj": 8, "_proj": 8, "head": 8}, [2, 2, 2, 2]),
        ({}, [2, 2, 2, 2]),
    ],
)
def test_alphas_of_single_modules(
    tmp_path: Path, alphas: dict[str, float], expected: list[float]
) -> None:
    """The same factors as PEFT: a key fits the end of a module's path at a dot, and the first key
    that fits counts."""
    weights = {
        f"base_model.model.{name}.lora_{part}.weight": torch.ones(2, 2)
        for name in MODULES
        for part in "AB"
    }
    write(tmp_path, CONFIG | {"alpha_pattern": alphas}, weights)
    factor, found = read_adapter(tmp_path, BASE)
    assert [factor * float(found[name][1][0, 0]) for name in MODULES] == expected


def test_ranks_of_single_modules(tmp_path: Path) -> None:
    weights = {
        f"{MODULES[0]}.lora_A.weight": torch.ones(4, 3),
        f"{MODULES[0]}.lora_B.weight": torch.ones(3, 4),
        f"{MODULES[2]}.lora_A.weight": torch.ones(2, 3),
        f"{MODULES[2]}.lora_B.weight": torch.ones(3, 2),
    }
    write(tmp_path, CONFIG | {"rank_pattern": {"q_proj": 4}, "use_rslora": True}, weights)
    factor, found = read_adapter(tmp_path, BASE)
    assert factor == 1.0 and found[MODULES[0]][0].shape == (4, 3)
    torch.testing.assert_close(found[MODULES[0]][1], torch.full((3, 4), 4 / 4**0.5))
    torch.testing.assert_close(found[MODULES[2]][1], torch.full((3, 2), 4 / 2**0.5))


@pytest.mark.parametrize(
    "more",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": r"(.*)*$((a+)+)+x"},  # never run
        {"target_modules": None, "layers_to_transform": [0], "layers_pattern": "layers"},
        {"fan_in_fan_out": True},  # it is about merging: A and B have the same shapes
        {
            "bias": "none",
            "modules_to_save": [],
            "use_dora": False,
            "init_lora_weights": True,
            "lora_dropout": 0.1,
        },
        {
            "init_lora_weights": "gaussian",
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "unknown_key": {"x": 1},
        },
    ],
)
def test_what_the_tensors_say_anyway_is_not_needed(tmp_path: Path, more: dict[str, Any]) -> None:
    write(tmp_path, CONFIG | more)
    factor, found = read_adapter(tmp_path, BASE)
    assert factor == 2.0 and list(found) == ["m"]


def test_an_embedding(tmp_path: Path) -> None:
    weights = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(2, 7),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": torch.ones(5, 2),
    }
    write(tmp_path, CONFIG, weights)
    a, b = read_adapter(tmp_path, BASE)[1]["model.embed_tokens"]
    assert a.shape == (2, 7) and b.shape == (5, 2)


@pytest.mark.parametrize(
    ("rows", "words"),
    [(7, None), (9, "it is a whole weight, as of modules_to_save or of new tokens")],
)
def test_the_weights_of_the_base_model_next_to_its_adapter_are_not_read(
    tmp_path: Path, rows: int, words: str | None
) -> None:
    """PEFT writes them if embeddings are adapted. With another number of rows they are those of
    more tokens."""
    entry = TensorEntry("model.embed_tokens.weight", (7, 5), "float32", "f", 0, 140)
    base = replace(BASE, tensors={entry.name: entry})
    weights = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(2, 7),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": torch.ones(5, 2),
        f"{PREFIX}model.embed_tokens.base_layer.weight": torch.ones(rows, 5),
    }
    write(tmp_path, CONFIG, weights)
    if words is None:
        assert list(read_adapter(tmp_path, base)[1]) == ["model.embed_tokens"]
        return
    with pytest.raises(ModelError, match=words):
        read_adapter(tmp_path, base)
