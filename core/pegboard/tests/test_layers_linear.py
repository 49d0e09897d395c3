"""Compares linear layers with plain matrices: merged parts, biases and adapters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.layers import Embedding, Head, Linear, QKVLinear
from pegboard.layers.build import LoRALimits
from pegboard_testing.fake_build import adapter_rows, fake_build, load_layers


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def merged_tensors(parts: dict[str, int], width: int) -> dict[str, Tensor]:
    tensors = {
        f"m.{name}.weight": random(rows, width, seed=i)
        for i, (name, rows) in enumerate(parts.items())
    }
    return tensors | {
        f"m.{name}.bias": random(rows, seed=50 + i) for i, (name, rows) in enumerate(parts.items())
    }


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.integers(1, 4), min_size=1, max_size=3), bias=st.booleans())
def test_merged_parts_side_by_side(rows: list[int], bias: bool) -> None:
    parts = {f"p{index}": count for index, count in enumerate(rows)}
    tensors = merged_tensors(parts, 6)
    x = random(5, 6, seed=99)
    layer = Linear(fake_build().at("m"), 6, sum(rows), parts=parts, bias=bias)
    assert load_layers([layer], tensors) == {
        name for name in tensors if bias or name.endswith("weight")
    }
    expected = [
        x @ tensors[f"m.{name}.weight"].T + (tensors[f"m.{name}.bias"] if bias else 0)
        for name in parts
    ]
    torch.testing.assert_close(layer(x), torch.cat(expected, 1))


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_without_parts_is_one_module(bias: bool) -> None:
    tensors = {"m.weight": random(3, 8), "m.bias": random(3, seed=1)}
    x = random(5, 8, seed=2)
    layer = Linear(fake_build().at("m"), 8, 3, bias=bias)
    load_layers([layer], tensors)
    torch.testing.assert_close(
        layer(x), x @ tensors["m.weight"].T + (tensors["m.bias"] if bias else 0)
    )


@pytest.mark.parametrize("bias", [False, True])
def test_query_key_and_value_heads(bias: bool) -> None:
    heads = 4
    kv_heads = 2
    dim = 3
    shapes = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    tensors = merged_tensors(shapes, 6)
    x = random(5, 6, seed=3)
    layer = QKVLinear(fake_build().at("m"), 6, heads, kv_heads, dim, bias=bias)
    load_layers([layer], tensors)
    for name, found in zip(shapes, layer(x), strict=True):
        expected = x @ tensors[f"m.{name}.weight"].T + (tensors[f"m.{name}.bias"] if bias else 0)
        torch.testing.assert_close(found.flatten(1), expected)
        assert found.shape == (5, shapes[name] // dim, dim)


def test_parts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not add up to 9"):
        Linear(fake_build().at("m"), 4, 9, parts={"gate": 4, "up": 4})


# --- adapters -------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(slots=st.lists(st.integers(0, 3), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_adapters_equal_merged_weights_token_by_token(slots: list[int], seed: int) -> None:
    """Every token has its own slot, and slot 0 is the base model. An adapter's rank may be smaller
    than the limit, and it may leave out modules."""
    parts = {"gate": 3, "up": 5}
    width = 6
    limits = LoRALimits(num_slots=3, max_rank=4, dtype="float32")
    tensors = {
        name: value
        for name, value in merged_tensors(parts, width).items()
        if name.endswith("weight")
    }
    build = fake_build(lora=limits, lora_rows=lambda: adapter_rows(slots, 3)).at("m")
    layer = Linear(build, width, 8, parts=parts)
    load_layers([layer], tensors)
    assert layer.adapters is not None
    weights = {0: dict(tensors)}
    for slot, (rank, names) in enumerate([(4, ["gate", "up"]), (1, ["up"]), (2, ["gate"])], 1):
        own = {
            f"m.{n}": (
                random(rank, width, seed=seed + slot),
                random(parts[n], rank, seed=seed + 9 * slot),
            )
            for n in names
        }
        layer.adapters.load(slot, layer.adapters.fitted(own, 0.5))
        weights[slot] = dict(tensors) | {
            f"{n}.weight": tensors[f"{n}.weight"] + 0.5 * b @ a for n, (a, b) in own.items()
        }
    x = random(len(slots), width, seed=seed)
    expected = [
        torch.cat([weights[slot][f"m.{name}.weight"] for name in parts]) @ row
        for slot, row in zip(slots, x, strict=True)
    ]
    torch.testing.assert_close(layer(x), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_a_slot_that_is_loaded_again_forgets_the_old_adapter() -> None:
    build = fake_build(lora=LoRALimits(1, 4, "float32"), lora_rows=lambda: adapter_rows([1], 1)).at(
        "m"
    )
    layer = Linear(build, 4, 4)
    load_layers([layer], {"m.weight": torch.eye(4)})
    assert layer.adapters is not None
    address = layer.adapters.a.data_ptr()
    layer.adapters.load(1, layer.adapters.fitted({"m": (random(4, 4), random(4, 4))}, 1.0))
    layer.adapters.load(1, layer.adapters.fitted({"m": (torch.ones(1, 4), torch.ones(4, 1))}, 2.0))
    assert layer.adapters.a.data_ptr() == address
    torch.testing.assert_close(layer(torch.ones(1, 4)), torch.full((1, 4), 9.0))
    layer.adapters.load(1, [])
    torch.testing.assert_close(layer(torch.ones(1, 4)), torch.ones(1, 4))
    with pytest.raises(ModelError, match="rank 5 of m exceeds max_lora_rank=4"):
        layer.adapters.fitted({"m": (random(5, 4), random(4, 5))}, 1.0)


# --- embedding and head ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head(is_tied: bool) -> None:
    build = fake_build()
    embedding = Embedding(build.at("embed"), 7, 4)
    head = Head(build.at("head"), 7, 4, tied=embedding if is_tied else None, bias=not is_tied)
    tensors = {
        "embed.weight": random(7, 4),
        "head.weight": random(7, 4, seed=1),
        "head.bias": random(7, seed=2),
    }
    used = load_layers(build.declared.layers, tensors)
    assert used == ({"embed.weight"} if is_tied else set(tensors))
    ids = torch.tensor([6, 0, 6])
    x = random(3, 4, seed=5)
    torch.testing.assert_close(embedding(ids), tensors["embed.weight"][ids])
    expected = (
        x @ tensors["embed.weight"].T
        if is_tied
        else x @ tensors["head.weight"].T + tensors["head.bias"]
    )
    torch.testing.assert_close(head(x), expected)
