"""Experts that move between ranks: where they go, and that the layers compute the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.config.schema import EngineConfig, EPLBConfig, check_engine
from pegboard.errors import ConfigError, ModelError
from pegboard.layers import Experts, RouterRule
from pegboard.layers.shards import Group
from pegboard.layers.slots import Slots
from pegboard.worker.expert_balance import ExpertBalance
from pegboard.worker.expert_policy import balanced, rank_loads
from pegboard_testing.fake_build import fake_build, load_layers
from pegboard_testing.fake_collective import on_ranks

HIDDEN, WIDTH = 8, 12
NAMES = ("gate_proj", "up_proj", "down_proj")


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Ranks, experts, and redundant experts that fit them."""
    ranks = draw(st.integers(2, 4))
    each = draw(st.integers(1, 8))
    experts = draw(st.integers(each, each * ranks))
    return ranks, experts, each * ranks - experts


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(shapes(), st.lists(st.integers(0, 3000), min_size=32, max_size=32))
def test_the_policy_lets_no_rank_compute_more(
    shape: tuple[int, int, int], skewed: list[int]
) -> None:
    ranks, count, redundant = shape
    loads = np.array(skewed[:count])
    now = np.array(Group(0, ranks, placement="linear", redundant=redundant).slots(count))
    found = balanced(now, loads)
    assert found.shape == now.shape
    assert set(found.ravel()) == set(range(count)), "each expert has a slot"
    assert rank_loads(found, loads).sum() == pytest.approx(loads.sum())
    assert rank_loads(found, loads).max() <= rank_loads(now, loads).max()
    for before, after in zip(now.tolist(), found.tolist(), strict=True):
        stays = set(before) & set(after)
        assert all(before.index(expert) in places(after, expert) for expert in stays)


def places(experts: list[int], expert: int) -> list[int]:
    return [slot for slot, each in enumerate(experts) if each == expert]


def test_the_policy_spreads_what_is_computed_most() -> None:
    now = np.array([[0, 1, 2, 0], [3, 4, 5, 1]])
    loads = np.array([4, 4, 8, 90, 2, 2])
    found = balanced(now, loads)
    assert [int((found == expert).sum()) for expert in range(6)] == [1, 1, 2, 2, 1, 1]
    assert all(len(set(each)) == 4 for each in found.tolist()), "one on each rank"
    assert rank_loads(found, loads).max() < 56
    assert balanced(now, np.zeros(6)) is now, "nothing was counted"


@given(shapes(), st.integers(0, 99))
def test_each_token_has_one_copy_of_each_expert(shape: tuple[int, int, int], seed: int) -> None:
    ranks, count, redundant = shape
    group = Group(0, ranks, placement="linear", redundant=redundant)
    chosen = random_experts(group, count, seed)
    turns = []
    for rank in range(ranks):
        slots = Slots(replace(group, rank=rank), count, "cpu")
        slots.place(chosen)
        turns.append(slots.turns.numpy())
        for expert in range(count):
            for slot in set(turns[-1][:, expert].tolist()) - {-1}:
                assert chosen[rank, slot] == expert
    assert ((np.array(turns) >= 0).sum(0) == 1).all()
    for expert in range(count):
        copies = (chosen == expert).sum()
        if len(turns[0]) > 1 and copies <= 6:
            on_each = [int((turn[:, expert] >= 0).sum()) for turn in turns]
            here = (chosen == expert).sum(1)
            assert on_each == (here * len(turns[0]) // copies).tolist(), "equal shares"


def random_experts(group: Group, count: int, seed: int) -> np.ndarray:
    slots = np.array(group.slots(count))
    return np.random.default_rng(seed).permutation(slots.ravel()).reshape(slots.shape)


@given(st.integers(1, 9), st.integers(2, 5), st.integers(0, 30))
def test_first_slots_are_equally_many_or_refused(count: int, ranks: int, redundant: int) -> None:
    group = Group(0, ranks, placement="linear", redundant=redundant)
    total = count + redundant
    if total % ranks or total // ranks > count:
        with pytest.raises(ModelError, match=f"{ranks} ranks cannot hold {count} experts"):
            group.slots(count)
        return
    slots = group.slots(count)
    assert all(len(set(each)) == len(each) == total // ranks for each in slots)
    assert {expert for each in slots for expert in each} == set(range(count))


def tensors_of(count: int) -> dict[str, Tensor]:
    tensors = {}
    for expert in range(count):
        for index, name in enumerate(NAMES):
            shape = (HIDDEN, WIDTH) if name == "down_proj" else (WIDTH, HIDDEN)
            tensors[f"m.{expert}.{name}.weight"] = random(*shape, seed=10 * expert + index)
            tensors[f"m.{expert}.{name}.bias"] = random(shape[0], seed=500 + 10 * expert + index)
    return tensors


def experts_of(group: Group, count: int) -> Experts:
    rule = RouterRule(min(2, count))
    build = fake_build(tensor=group, path="m")
    layer = Experts(build, count, HIDDEN, WIDTH, rule=rule, bias=True)
    load_layers([layer], tensors_of(count), bind=False)
    return layer


@settings(deadline=None, max_examples=25)
@given(shapes(), st.integers(0, 99))
def test_layers_compute_the_same_wherever_their_experts_are(
    shape: tuple[int, int, int], seed: int
) -> None:
    ranks, count, redundant = shape
    x = random(7, HIDDEN, seed=seed)
    logits = random(7, count, seed=seed + 1)
    whole = experts_of(Group(), count)
    whole.bind()
    expected = whole(x, logits)
    ids = logits.topk(min(2, count)).indices

    def run(group: Group) -> None:
        group = replace(group, placement="linear", redundant=redundant)
        layer = experts_of(group, count)
        slots = layer.slots
        assert slots is not None
        balance = ExpertBalance([layer], group, EPLBConfig(step_interval=3, window_size=2), "cpu")
        layer.bind()
        for step in range(8):
            torch.testing.assert_close(layer(x, logits), expected)
            assert torch.equal(slots.counts, torch.bincount(ids.flatten(), minlength=count).int())
            balance.end_step()
            if step % 3 == 0:
                balance._move(layer, slots, random_experts(group, count, seed + step))
        balance.restore()
        assert (slots.experts == slots.first).all() and not balance.window.any()
        for method, untouched in zip(layer.methods, experts_of(group, count).methods, strict=True):
            assert torch.equal(method.dequantize(), untouched.dequantize())

    on_ranks(ranks, run)


def test_the_window_forgets_and_the_log_tells(caplog: pytest.LogCaptureFixture) -> None:
    config = EPLBConfig(step_interval=4, window_size=2, log_balancedness=True)
    to_first = torch.tensor([[9.0, 8, 0, 0]])
    to_last = torch.tensor([[0.0, 0, 9, 8]])

    def run(group: Group) -> Any:
        group = replace(group, placement="linear", redundant=0)
        layer = experts_of(group, 4)
        balance = ExpertBalance([layer], group, config, "cpu")
        layer.bind()
        for logits in (to_last, to_last, to_first, to_first):
            layer(random(1, HIDDEN), logits)
            balance.end_step()
        assert layer.slots is not None
        return layer.slots.experts.tolist()

    with caplog.at_level(logging.INFO, "pegboard.worker.expert_balance"):
        first, second = on_ranks(2, run)
    assert first == second
    assert not {0, 1} <= set(first[0]) and not {0, 1} <= set(first[1])
    (told,) = [record.getMessage() for record in caplog.records]
    assert "0.50 before, 1.00 now" in told and "moved 2 experts" in told


def test_weights_that_cannot_move_are_refused_by_name() -> None:
    def without(group: Group) -> None:
        layer = experts_of(replace(group, placement="linear", redundant=0), 4)
        layer.methods[1].expert_memory = lambda count: None  # type: ignore[attr-defined]
        ExpertBalance([layer], group, EPLBConfig(), "cpu")

    def different(group: Group) -> None:
        layer = experts_of(replace(group, placement="linear", redundant=0), 4)
        memory = layer.memory()
        layer.memory = lambda: replace(memory, form=group.rank)  # type: ignore[method-assign]
        ExpertBalance([layer], group, EPLBConfig(), "cpu")

    with pytest.raises(ConfigError, match="m: FakeWeight stores .* remove enable_eplb"):
        on_ranks(2, without)
    with pytest.raises(ConfigError, match="m: the ranks store .* remove enable_eplb"):
        on_ranks(2, different)


ON = {"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable_eplb": True}, "enable_eplb needs enable_expert_parallel"),
        ({**ON, "tensor_parallel_size": 1}, "tensor_parallel_size of at least 2"),
        ({**ON, "max_loras": 1}, "cannot be used with LoRA"),
        ({"eplb_config": {"step_interval": 5}}, "eplb_config needs enable_eplb"),
        ({**ON, "eplb_config": {"step_interval": 0}}, "step_interval must be at least 1, got 0"),
        ({**ON, "eplb_config": {"window_size": 0}}, "window_size must be at least 1, got 0"),
        ({**ON, "eplb_config": {"num_redundant_experts": -1}}, "must be at least 0, got -1"),
        ({**ON, "eplb_config": {"use_async": True}}, "use_async must be false"),
        ({**ON, "eplb_config": {"policy": "best"}}, "policy must be 'default', got 'best'"),
        ({**ON, "eplb_config": {"step_intervall": 5}}, "step_intervall.*did you mean"),
        ({**ON, "eplb_config": {"step_interval": "x"}}, "eplb_config: Expected `int`"),
        (
            {
                **ON,
                "expert_placement_strategy": "round_robin",
                "eplb_config": {"num_redundant_experts": 2},
            },
            "needs expert_placement_strategy 'linear'",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineConfig(**values))
