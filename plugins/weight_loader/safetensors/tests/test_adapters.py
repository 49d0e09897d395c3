"""Adapters on disk: a good one is loaded, and for every damaged one the reason names it."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_weight_loader_safetensors.adapters import read_adapter
from safetensors.torch import save_file

from pegboard.data.request import AdapterRef
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard.layers import Linear
from pegboard.layers.build import LoRALimits
from pegboard.plugins.discovery import Scan
from pegboard.plugins.registry import Registry
from pegboard.worker.worker import Worker
from pegboard_testing.fake_build import fake_build, load_layers

CONFIG = {"r": 2, "lora_alpha": 4}
NAME = "base_model.model.m.lora_"
BASE = Checkpoint(format="f", path=Path("f"), config={}, architectures=(), tensors={}, tokenizer=TokenizerPayload("hf"))


def tensors(**changes: Any) -> dict[str, torch.Tensor]:
    return {f"{NAME}A.weight": torch.ones(2, 4), f"{NAME}B.weight": torch.ones(3, 2)} | changes


def write(folder: Path, config: Any = CONFIG, weights: Any = None) -> AdapterRef:
    if config is not None:
        (folder / "adapter_config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    if isinstance(weights, bytes):
        (folder / "adapter_model.safetensors").write_bytes(weights)
    else:
        save_file(tensors() if weights is None else weights, folder / "adapter_model.safetensors")
    return AdapterRef(1, "poet", str(folder))


def linear() -> Linear:
    build = fake_build(lora=LoRALimits(1, 4), lora_slots=lambda: torch.tensor([1])).at("m")
    layer = Linear(build, 4, 3)
    load_layers([layer], {"m.weight": torch.zeros(3, 4)})
    return layer


def load_adapter(layers: list[Linear], slot: int, adapter: AdapterRef, registry: Registry | None = None) -> str | None:
    """Let a worker with these layers load an adapter. Return why it is not possible."""
    worker = Worker(
        registry or Registry.discover(), SimpleNamespace(config=None, limits=None, vocabulary=dict, checkpoint=BASE), 0
    )
    worker.build = SimpleNamespace(declared=SimpleNamespace(layers=layers))
    return worker.load_adapter(slot, adapter)


def test_without_a_loader_that_reads_adapters_there_is_a_reason(tmp_path: Path) -> None:
    reason = load_adapter([linear()], 1, write(tmp_path), Registry(Scan()))
    assert reason == f"adapter 'poet': no installed weight loader reads the adapter in {tmp_path}"


def test_a_good_adapter_is_scaled_by_alpha_over_rank(tmp_path: Path) -> None:
    layer = linear()
    assert load_adapter([layer], 1, write(tmp_path)) is None
    assert layer.adapters is not None
    torch.testing.assert_close(layer.adapters.b[1] @ layer.adapters.a[1], torch.full((3, 4), 4.0))
    load_adapter([layer], 1, write(tmp_path, CONFIG | {"use_rslora": True}))
    torch.testing.assert_close(layer.adapters.b[1] @ layer.adapters.a[1], torch.full((3, 4), 2 * 4 / 2**0.5))


def test_rows_of_queries_and_keys_follow_the_order_of_the_base_model(tmp_path: Path) -> None:
    """A base model in GGUF stores the rows of a head in pairs: 0, 4, 1, 5, …"""
    b = torch.arange(16.0).view(16, 1)
    names = {f"base_model.model.m.{part}.lora_{end}.weight": value for part in ("q_proj", "k_proj", "v_proj")
             for end, value in (("A", torch.ones(1, 4)), ("B", b.clone()))}  # fmt: skip
    write(tmp_path, {"r": 1, "lora_alpha": 1}, names)
    base = replace(BASE, rope_style="pairs", config={"num_attention_heads": 2, "num_key_value_heads": 1})
    _, found = read_adapter(tmp_path, base)
    assert found["m.q_proj"][1].flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert found["m.k_proj"][1].flatten().tolist() == [row for pair in zip(range(8), range(8, 16), strict=True) for row in pair]
    assert torch.equal(found["m.v_proj"][1], b)
    assert all(torch.equal(read_adapter(tmp_path, BASE)[1][name][1], b) for name in found)


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (b"{", None, "is not JSON"),
        (b"[" * 100_000, None, "is not JSON"),
        (b"\xff", None, "is not JSON"),
        ([], None, "not a JSON object"),
        ({}, None, "got None and None"),
        (CONFIG | {"r": 0}, None, "got 0 and 4"),
        (CONFIG | {"r": "2"}, None, "got '2' and 4"),
        (CONFIG | {"r": True}, None, "got True and 4"),
        (CONFIG | {"lora_alpha": None}, None, "got 2 and None"),
        (CONFIG | {"lora_alpha": float("nan")}, None, "got 2 and nan"),
        (CONFIG | {"lora_alpha": 10**400}, None, "`lora_alpha`"),
        (CONFIG, b"", "is damaged"),
        (CONFIG, b"\xff" * 64, "is damaged"),
        (CONFIG, {f"{NAME}A.weight": torch.ones(2, 4)}, "lora_B.weight is missing"),
        (CONFIG, {f"{NAME}B.weight": torch.ones(3, 2)}, "lora_A.weight is missing"),
        (CONFIG, tensors(**{f"{NAME}magnitude_vector": torch.ones(3)}), "magnitude_vector is not supported"),
        (CONFIG, tensors(**{f"{NAME}A.weight": torch.ones(2, 5)}), r"shapes of m do not fit the model: A \[2, 5\], B \[3, 2\]"),
        (CONFIG, tensors(**{f"{NAME}B.weight": torch.ones(3, 1)}), r"A \[2, 4\], B \[3, 1\]"),
        (CONFIG, tensors(**{f"{NAME}A.weight": torch.ones(8)}), r"A \[8\]"),
        (CONFIG, tensors(**{f"{NAME}A.weight": torch.ones(5, 4), f"{NAME}B.weight": torch.ones(3, 5)}), "max_lora_rank=4"),
        (CONFIG, {name.replace(".m.", ".x."): tensor for name, tensor in tensors().items()}, "does not have: x"),
    ],
)
def test_a_bad_adapter_is_an_error_that_names_it(tmp_path: Path, config: Any, weights: Any, words: str) -> None:
    reason = load_adapter([linear()], 1, write(tmp_path, config, weights))
    assert reason is not None and reason.startswith("adapter 'poet': ") and re.search(words, reason), reason


@pytest.mark.parametrize("path", ["", "/none", "a\0b", "x" * 5000, "org/name", None, 3, "/dev/zero"])
def test_a_bad_path_is_an_error_that_names_the_adapter(path: Any) -> None:
    reason = load_adapter([linear()], 1, AdapterRef(1, "poet", path))
    assert reason is not None and reason.startswith("adapter 'poet': ")


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
        assert reason is None or reason.startswith("adapter 'poet': ")
