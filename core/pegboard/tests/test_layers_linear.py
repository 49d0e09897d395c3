"""Linear layers: merged parts, shares of tensor-parallel ranks, biases and adapters, against plain matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.errors import ConfigError, ModelError
from pegboard.layers import Embedding, Group, Head, Linear, QKVLinear
from pegboard.layers.build import LoRALimits
from pegboard_testing.fake_build import fake_build, load_layers, run_ranks


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def merged_tensors(parts: dict[str, int], width: int) -> dict[str, Tensor]:
    tensors = {f"m.{name}.weight": random(rows, width, seed=i) for i, (name, rows) in enumerate(parts.items())}
    return tensors | {f"m.{name}.bias": random(rows, seed=50 + i) for i, (name, rows) in enumerate(parts.items())}


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from([1, 2, 3]), rows=st.lists(st.integers(1, 4), min_size=1, max_size=3), bias=st.booleans())
def test_column_shares_side_by_side_are_the_whole(size: int, rows: list[int], bias: bool) -> None:
    parts = {f"p{index}": count * size for index, count in enumerate(rows)}
    tensors, x = merged_tensors(parts, 6), random(5, 6, seed=99)

    def rank(group: Group) -> Tensor:
        layer = Linear(fake_build(tensor=group).at("m"), 6, sum(parts.values()), split="column", parts=parts, bias=bias)
        load_layers([layer], tensors)
        return layer(x)

    shares = run_ranks(size, rank)
    start = 0
    for name, count in parts.items():
        own = slice(start // size, (start + count) // size)
        expected = x @ tensors[f"m.{name}.weight"].T + (tensors[f"m.{name}.bias"] if bias else 0)
        torch.testing.assert_close(torch.cat([share[:, own] for share in shares], 1), expected)
        start += count


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_shares_sum_to_the_whole_on_every_rank(size: int, bias: bool) -> None:
    """The bias is added once, not once per rank."""
    tensors, x = {"m.weight": random(3, 8), "m.bias": random(3, seed=1)}, random(5, 8, seed=2)

    def rank(group: Group) -> Tensor:
        layer = Linear(fake_build(tensor=group).at("m"), 8, 3, split="row", bias=bias)
        load_layers([layer], tensors)
        width = 8 // group.size
        return layer(x[:, group.rank * width : (group.rank + 1) * width])

    expected = x @ tensors["m.weight"].T + (tensors["m.bias"] if bias else 0)
    for output in run_ranks(size, rank):
        torch.testing.assert_close(output, expected)


def test_a_row_split_that_is_not_reduced_gives_the_ranks_share() -> None:
    tensors, x = {"m.weight": random(3, 8)}, random(5, 8, seed=2)

    def rank(group: Group) -> Tensor:
        layer = Linear(fake_build(tensor=group).at("m"), 8, 3, split="row", reduce=False)
        load_layers([layer], tensors)
        return layer(x[:, group.rank * 4 : group.rank * 4 + 4])

    shares = run_ranks(2, rank)
    assert not torch.allclose(shares[0], shares[1])
    torch.testing.assert_close(shares[0] + shares[1], x @ tensors["m.weight"].T)


@pytest.mark.parametrize("size", [1, 2])
def test_heads_of_all_ranks_are_all_heads(size: int) -> None:
    heads, kv_heads, dim = 4, 2, 3
    shapes = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
    tensors = {f"a.{name}.weight": random(rows, 6, seed=rows + i) for i, (name, rows) in enumerate(shapes.items())}
    x = random(5, 6, seed=3)

    def rank(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        layer = QKVLinear(fake_build(tensor=group).at("a"), 6, heads, kv_heads, dim)
        load_layers([layer], tensors)
        return tuple(part.clone() for part in layer(x))

    for name, shares in zip(shapes, zip(*run_ranks(size, rank), strict=True), strict=True):
        torch.testing.assert_close(torch.cat(shares, 1).flatten(1), x @ tensors[f"a.{name}.weight"].T)


def test_what_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"m\.up: 5 does not divide by tensor_parallel_size=2"):
        Linear(fake_build(tensor=Group(0, 2)).at("m"), 4, 9, split="column", parts={"gate": 4, "up": 5})
    with pytest.raises(ConfigError, match="do not add up to 9"):
        Linear(fake_build().at("m"), 4, 9, parts={"gate": 4, "up": 4})


@pytest.mark.parametrize("has_bias", [False, True])
def test_auto_bias_is_what_the_checkpoint_has(has_bias: bool) -> None:
    tensors = {"m.weight": random(3, 4)} | ({"m.bias": random(3)} if has_bias else {})
    layer = Linear(fake_build().at("m"), 4, 3, bias="auto")
    assert load_layers([layer], tensors) == set(tensors)
    x = random(2, 4, seed=1)
    torch.testing.assert_close(layer(x), x @ tensors["m.weight"].T + tensors.get("m.bias", torch.zeros(3)))


# --- adapters ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(slots=st.lists(st.integers(0, 3), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_adapters_equal_merged_weights_token_by_token(slots: list[int], seed: int) -> None:
    """Every token has its own slot; slot 0 is the base; ranks may be smaller than the limit; a module may be left out."""
    parts, width, limits = {"gate": 3, "up": 5}, 6, LoRALimits(num_slots=3, max_rank=4)
    tensors = {name: value for name, value in merged_tensors(parts, width).items() if name.endswith("weight")}
    build = fake_build(lora=limits, lora_slots=lambda: torch.tensor(slots)).at("m")
    layer = Linear(build, width, 8, parts=parts)
    load_layers([layer], tensors)
    assert layer.adapters is not None
    weights = {0: dict(tensors)}
    for slot, (rank, names) in enumerate([(4, ["gate", "up"]), (1, ["up"]), (2, ["gate"])], 1):
        own = {f"m.{n}": (random(rank, width, seed=seed + slot), random(parts[n], rank, seed=seed + 9 * slot)) for n in names}
        layer.adapters.load(slot, own, scaling=0.5)
        weights[slot] = dict(tensors) | {f"{n}.weight": tensors[f"{n}.weight"] + 0.5 * b @ a for n, (a, b) in own.items()}
    x = random(len(slots), width, seed=seed)
    expected = [
        torch.cat([weights[slot][f"m.{name}.weight"] for name in parts]) @ row for slot, row in zip(slots, x, strict=True)
    ]
    torch.testing.assert_close(layer(x), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_a_slot_that_is_loaded_again_forgets_the_old_adapter() -> None:
    build = fake_build(lora=LoRALimits(1, 4), lora_slots=lambda: torch.tensor([1])).at("m")
    layer = Linear(build, 4, 4)
    load_layers([layer], {"m.weight": torch.eye(4)})
    assert layer.adapters is not None
    address = layer.adapters.a.data_ptr()
    layer.adapters.load(1, {"m": (random(4, 4), random(4, 4))}, 1.0)
    layer.adapters.load(1, {"m": (torch.ones(1, 4), torch.ones(4, 1))}, 2.0)
    assert layer.adapters.a.data_ptr() == address
    torch.testing.assert_close(layer(torch.ones(1, 4)), torch.full((1, 4), 9.0))
    layer.adapters.load(1, {}, 1.0)
    torch.testing.assert_close(layer(torch.ones(1, 4)), torch.ones(1, 4))
    with pytest.raises(ModelError, match="rank 5 of m is over max_lora_rank=4"):
        layer.adapters.load(1, {"m": (random(5, 4), random(4, 5))}, 1.0)


# --- embedding and head ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head(is_tied: bool) -> None:
    build = fake_build()
    embedding = Embedding(build.at("embed"), 7, 4)
    head = Head(build.at("head"), 7, 4, tied=embedding if is_tied else None, bias=not is_tied)
    tensors = {"embed.weight": random(7, 4), "head.weight": random(7, 4, seed=1), "head.bias": random(7, seed=2)}
    used = load_layers(build.declared.layers, tensors)
    assert used == ({"embed.weight"} if is_tied else set(tensors))
    ids, x = torch.tensor([6, 0, 6]), random(3, 4, seed=5)
    torch.testing.assert_close(embedding(ids), tensors["embed.weight"][ids])
    expected = x @ tensors["embed.weight"].T if is_tied else x @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(head(x), expected)
