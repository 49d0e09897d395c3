"""Layers that ranks divide compute what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard import ops
from pegboard.errors import ModelError
from pegboard.layers import Build, Experts, Head, Linear, QKVLinear, RouterRule
from pegboard.layers.build import LoRALimits
from pegboard.layers.embedding import Embedding
from pegboard.layers.shards import Group, Placement, Stage, dealt
from pegboard_testing.fake_build import adapter_rows, fake_build, load_layers
from pegboard_testing.fake_collective import on_ranks

SIZES = (1, 2, 3, 4)
PLACEMENTS: tuple[Placement, ...] = ("linear", "round_robin")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ranks_of(
    size: int,
    compute: Callable[[Build], Any],
    placement: Placement | None = None,
    **more: Any,
) -> list[Any]:
    def run(group: Group) -> Any:
        return compute(fake_build(tensor=replace(group, placement=placement), path="m", **more))

    return on_ranks(size, run)


@given(st.integers(1, 200), st.integers(1, 9))
def test_shares_are_whole_and_nearly_equal(count: int, size: int) -> None:
    if count < size:
        with pytest.raises(ModelError, match=f"divide among {size} ranks"):
            dealt(count, size)
        return
    spans = [Group(rank, size).share(count) for rank in range(size)]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == count and all(start < stop for start, stop in spans)
    lengths = {stop - start for start, stop in dealt(count, size)}
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_every_query_head_has_one_rank_and_its_kv_head(kv: int, each: int, size: int) -> None:
    held: list[int] = []
    try:
        shares = [Group(rank, size).heads(kv * each, kv) for rank in range(size)]
    except ModelError:
        assert size > kv and size > kv * each or size > kv and each < -(-size // kv)
        return
    for heads, kv_heads in shares:
        held += range(*heads)
        count = (heads[1] - heads[0]) // (kv_heads[1] - kv_heads[0])
        for i, head in enumerate(range(*heads)):
            assert head // each == kv_heads[0] + i // count
    assert held == list(range(kv * each))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_feed_forward_block(size: int, bias: bool) -> None:
    """Rows and columns of the shares fit each other, also if gate and up are one tensor."""
    hidden, width = 8, 28
    names = ("gate", "up", "down", "both")
    shapes = [(width, hidden), (width, hidden), (hidden, width), (2 * width, hidden)]
    pairs = list(zip(names, shapes, strict=True))
    tensors = {f"m.{n}.weight": random(*s, seed=i) for i, (n, s) in enumerate(pairs)}
    tensors |= {f"m.{n}.bias": random(s[0], seed=9) for n, s in pairs}
    tensors["m.both.weight"] = torch.cat([tensors["m.gate.weight"], tensors["m.up.weight"]])
    tensors["m.both.bias"] = torch.cat([tensors["m.gate.bias"], tensors["m.up.bias"]])
    x = random(5, hidden, seed=7)

    def compute(build: Build) -> list[Tensor]:
        results = []
        for parts in ({"gate": width, "up": width}, {"both": (width, width)}):
            up = Linear(build, hidden, 2 * width, parts=parts, bias=bias, split="rows")
            down = Linear(build.at("down"), width, hidden, bias=bias, split="columns")
            load_layers([up, down], tensors)
            gate, raised = up(x).chunk(2, 1)
            results.append(down(gate * raised))
        return results

    ((expected, _),) = ranks_of(1, compute)
    for results in ranks_of(size, compute):
        for result in results:
            torch.testing.assert_close(result, expected)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from(SIZES),
    st.sampled_from([("q_proj", "k_proj", "v_proj"), ("qkv",), ("q", "kv")]),
)
def test_the_heads_of_queries_keys_and_values(
    kv: int, each: int, size: int, names: tuple[str, ...]
) -> None:
    dim, hidden, heads = 4, 6, kv * each
    merged = random((heads + 2 * kv) * dim, hidden)
    x = random(3, hidden, seed=1)
    splits = {1: [heads + 2 * kv], 2: [heads, 2 * kv], 3: [heads, kv, kv]}[len(names)]
    weights = merged.split([count * dim for count in splits])
    tensors = {f"m.{name}.weight": weight for name, weight in zip(names, weights, strict=True)}
    if size > kv and (size > heads or each < -(-size // kv)):
        return

    def compute(build: Build) -> tuple[Tensor, ...]:
        layer = QKVLinear(build, hidden, heads, kv, dim, names=names)
        load_layers([layer], tensors)
        q, k, v = layer(x)
        repeats = q.shape[1] // k.shape[1]
        out = q + k.repeat_interleave(repeats, 1) * v.repeat_interleave(repeats, 1)
        return (out,)

    ((expected,),) = ranks_of(1, compute)
    results = [out for (out,) in ranks_of(size, compute)]
    torch.testing.assert_close(torch.cat(results, 1), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head(size: int, is_tied: bool) -> None:
    rows, width = 29, 6
    tensors = {"m.embed.weight": random(rows, width), "m.head.weight": random(rows, width, seed=1)}
    tensors["m.head.bias"] = random(rows, seed=2)

    def compute(build: Build) -> Tensor:
        embedding = Embedding(build.at("embed"), rows, width)
        tied = embedding if is_tied else None
        head = Head(build.at("head"), rows, width, tied=tied, bias=not is_tied)
        load_layers([embedding, head], tensors)
        logits: Tensor = head(embedding(torch.tensor([3, 28, 0])))
        return logits

    (expected,) = ranks_of(1, compute)
    for logits in ranks_of(size, compute):
        torch.testing.assert_close(logits, expected)
        assert logits.shape == (3, rows)


@given(st.integers(1, 40), st.integers(2, 9), st.sampled_from(PLACEMENTS))
def test_every_expert_has_one_rank(count: int, size: int, placement: Placement) -> None:
    if count < size:
        with pytest.raises(ModelError, match=f"{count} heads, channels or experts"):
            Group(0, size, placement=placement).experts(count)
        return
    held = [Group(rank, size, placement=placement).experts(count) for rank in range(size)]
    assert sorted(expert for each in held for expert in each) == list(range(count))
    assert len(held[0]) - len(held[-1]) in (0, 1)
    neighbors = [expert for each in held for expert in each] == list(range(count))
    assert neighbors or placement == "round_robin"


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_rows_of_other_ranks_experts_are_left_out(data: st.DataObject) -> None:
    num_experts, size = data.draw(st.integers(2, 9)), data.draw(st.integers(2, 4))
    top_k = data.draw(st.integers(1, num_experts))
    tokens = data.draw(st.integers(1, 20))
    ids = random(tokens, num_experts, seed=tokens).topk(top_k).indices.int()
    x = random(tokens, 6)
    weights = random(tokens, top_k, seed=5)
    owners = torch.arange(num_experts) % size
    total = torch.zeros(tokens, 6)
    for rank in range(size):
        held = (owners == rank).nonzero().flatten()
        places = torch.full((num_experts,), -1, dtype=torch.int32)
        places[held] = torch.arange(len(held), dtype=torch.int32)
        rows, found, starts = ops.sort_by_expert(x, ids, len(held), None, places)
        assert ((found < 0) == (owners[ids.long()] != rank)).all()
        assert int(starts[-1]) == int((found >= 0).sum())
        for i, expert in enumerate(held.tolist()):
            own = rows[starts[i] : starts[i + 1]]
            torch.testing.assert_close(own, x[(ids == expert).any(1)])
        rows = rows[: int(starts[-1])]
        total += ops.sum_experts(rows, found, weights)
    torch.testing.assert_close(total, x * weights.sum(1, keepdim=True))


@pytest.mark.parametrize("placement", [None, *PLACEMENTS])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stacked", ["", "merged", "interleaved"])
def test_experts(size: int, stacked: str, placement: Placement | None) -> None:
    hidden, width, num_experts = 8, 12, 5
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = {}
    each = [
        [random(*shape, seed=10 * e + i) for i, shape in enumerate([(width, hidden)] * 2)]
        for e in range(num_experts)
    ]
    downs = [random(hidden, width, seed=50 + e) for e in range(num_experts)]
    if not stacked:
        for e, (gate, up) in enumerate(each):
            for name, weight in zip(names, (gate, up, downs[e]), strict=True):
                tensors[f"{e}.{name}.weight"] = weight
                tensors[f"{e}.{name}.bias"] = random(weight.shape[0], seed=80 + e)
    else:
        merge = (
            torch.cat if stacked == "merged" else (lambda pair: torch.stack(pair, 1).flatten(0, 1))
        )
        tensors["gate_up_proj"] = torch.stack([merge(pair) for pair in each])
        tensors["down_proj"] = torch.stack(downs)
        tensors["gate_up_proj_bias"] = random(num_experts, 2 * width, seed=90)
        tensors["down_proj_bias"] = random(num_experts, hidden, seed=91)
    tensors = {f"m.experts.{name}": tensor for name, tensor in tensors.items()}
    x, logits, shared = random(5, hidden), random(5, num_experts, seed=3), random(5, hidden, seed=4)

    class Halves:
        def bind(self, kernels: Any, is_interleaved: bool) -> Callable[[Tensor], Tensor]:
            def call(x: Tensor) -> Tensor:
                gate, up = (x[:, ::2], x[:, 1::2]) if is_interleaved else x.chunk(2, 1)
                return gate.sigmoid() * up

            return call

    def compute(build: Build) -> Tensor:
        experts = Experts(
            build.at("experts"),
            num_experts,
            hidden,
            width,
            rule=RouterRule(2),
            bias=True,
            activation=Halves(),
            is_interleaved=stacked == "interleaved",
        )
        load_layers([experts], tensors)
        out: Tensor = experts(x, logits, shared)
        return out

    (expected,) = ranks_of(1, compute)
    for out in ranks_of(size, compute, placement):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("count", "size", "expected"), [(11008, 2, 5632), (768, 4, 192), (7, 2, 4)]
)
def test_shares_keep_blocks_whole_if_that_is_fair(count: int, size: int, expected: int) -> None:
    start, stop = Group(0, size).share(count)
    assert stop - start == expected


@given(st.integers(1, 9), st.integers(0, 30))
def test_stages_have_all_layers_in_order(count: int, more: int) -> None:
    stages = [Stage(number, count).layers(count + more) for number in range(count)]
    assert [layer for layers in stages for layer in layers] == [*range(count + more)]
    sizes = [len(layers) for layers in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes) and sizes[0] <= min(sizes[1:-1], default=max(sizes))
    with pytest.raises(ModelError, match="pipeline_parallel_size"):
        Stage(0, count).layers(count - 1)


# --- adapters that ranks divide -------------------------------------------------------------------

MAX_RANK = 21


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(SIZES),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([("q_proj", "k_proj", "v_proj"), ("qkv",), ("q", "kv")]),
    st.sampled_from([("gate", "up"), ("both",)]),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(0, MAX_RANK), min_size=3, max_size=3),
    st.integers(0, 99),
)
def test_ranks_divide_both_matrices_of_adapters(
    size: int,
    kv: int,
    each: int,
    names: tuple[str, ...],
    up_names: tuple[str, ...],
    slots: list[int],
    adapter_ranks: list[int],
    seed: int,
) -> None:
    """Adapters of ranks that the number of members does not divide, and some that leave out modules
    or the whole layer. Their matrices take less memory."""
    dim, hidden, heads, width = 4, 12, kv * each, 28
    if size > kv and (size > heads or each < -(-size // kv)):
        return
    splits = {1: [heads + 2 * kv], 2: [heads, 2 * kv], 3: [heads, kv, kv]}[len(names)]
    shapes = {name: (count * dim, hidden) for name, count in zip(names, splits, strict=True)}
    shapes |= {name: (2 * width // len(up_names), hidden) for name in up_names}
    shapes["down"] = hidden, width
    tensors = {
        f"m.{name}.weight": random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())
    }
    generator = torch.Generator().manual_seed(seed)
    adapters = [
        {
            f"m.{name}": (
                torch.randn(rank, columns, generator=generator),
                torch.randn(rows, rank, generator=generator),
            )
            for name, (rows, columns) in shapes.items()
            if rank and torch.rand(1, generator=generator) < 0.7
        }
        for rank in adapter_ranks
    ]
    x = random(len(slots), hidden, seed=7)
    parts = {name: (width,) * (2 // len(up_names)) for name in up_names}

    def compute(build: Build) -> tuple[list[Tensor], int, int]:
        qkv = QKVLinear(build, hidden, heads, kv, dim, names=names)
        up = Linear(build, hidden, 2 * width, parts=parts, split="rows")
        down = Linear(build.at("down"), width, hidden, split="columns")
        layers = [qkv, up, down]
        load_layers(layers, tensors)
        for slot, adapter in [(1, adapters[2]), *enumerate(adapters, 1)]:
            for layer in layers:
                layer.adapters.load(slot, layer.adapters.fitted(adapter, 0.5))
        gate, raised = up(x).chunk(2, 1)
        memory = [each.adapters.a.nbytes + each.adapters.b.nbytes for each in layers]
        return [*qkv(x), down(gate * raised)], memory[0] + memory[1], memory[2]

    def results(size: int, *, is_fully_sharded: bool) -> list[Any]:
        limits = LoRALimits(3, MAX_RANK, "float32", is_fully_sharded)
        return ranks_of(size, compute, lora=limits, lora_rows=lambda: adapter_rows(slots, 3))

    ((whole, *alone),) = results(1, is_fully_sharded=True)
    divided = results(size, is_fully_sharded=True)
    assert size > 1 or divided[0][1:] == tuple(alone), "one rank has nothing to divide"
    halves = results(size, is_fully_sharded=False)
    for (found, *memory), (expected, *more) in zip(divided, halves, strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[-1], whole[-1], atol=1e-4, rtol=1e-4)
        assert size == 1 or all(one < other for one, other in zip(memory, more, strict=True))
