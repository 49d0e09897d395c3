"""Views of the KV memory: which layers share bytes, and that no other blocks or layers overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.engine.kv.plan import capacity, plan_kv
from pegboard.interfaces.attention import KVCacheSpec, KVGroup, KVPlan, KVTensor, State
from pegboard.worker.memory import allocate, copy_blocks, null_plan, random_prompt, trial_steps
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.fake_model import fake_kv_spec

NUM_BLOCKS = 5


def group(layers: tuple[int, ...], block_size: int, *tensors: KVTensor, **more: object) -> KVGroup:
    return KVGroup(layers, KVCacheSpec(tensors=tensors, **more), block_size)  # type: ignore[arg-type]


def plan_of(*groups: KVGroup) -> KVPlan:
    """Make a plan whose blocks are large enough for every group."""
    slots = [(g.block_size if g.spec.unit == "token" else 1) * g.spec.slot_bytes() for g in groups]
    return KVPlan(groups, NUM_BLOCKS, max(slots) * max(len(g.layers) for g in groups), 16)


def plain(heads: int = 2, width: int = 4, dtype: str = "float32") -> tuple[KVTensor, KVTensor]:
    return KVTensor("k", (heads, width), dtype), KVTensor("v", (heads, width), dtype)


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


PLANS = {
    "one group": plan_of(group((0, 1, 2), 4, *plain())),
    "two groups of one layout": plan_of(group((0, 2), 4, *plain()), group((1, 3), 4, *plain())),
    "groups of different size": plan_of(group((0, 1), 4, *plain()), group((2,), 4, *plain())),
    "two layouts in packed blocks": plan_of(
        group((0,), 4, *plain()), group((1,), 8, KVTensor("kv", (8,), "bfloat16"))
    ),
    "states and tokens": plan_of(
        group((0,), 4, *plain()),
        group((1,), 4, KVTensor("s", (16, 2), "float32"), unit="request", retain=State()),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_views_have_the_declared_shape_and_are_zero(name: str) -> None:
    plan = PLANS[name]
    views = allocate(plan, zeros)
    assert sorted(views) == sorted(layer for g in plan.groups for layer in g.layers)
    for g in plan.groups:
        for layer in g.layers:
            for tensor in g.spec.tensors:
                view = views[layer][tensor.name]
                slots = (g.block_size,) if g.spec.unit == "token" else ()
                assert view.shape == (NUM_BLOCKS, *slots, *tensor.shape)
                assert view.dtype == getattr(torch, tensor.dtype) and not view.any()


@pytest.mark.parametrize("name", PLANS)
def test_a_block_is_nobody_elses(name: str) -> None:
    """Writing a block of a layer changes no other block of any layer, and no other layer of its
    group."""
    plan = PLANS[name]
    for writer_group in plan.groups:
        for writer in writer_group.layers:
            for tensor in writer_group.spec.tensors:
                views = allocate(plan, zeros)
                views[writer][tensor.name][2] = 1
                for layer, named in views.items():
                    for other, view in named.items():
                        assert not view[[0, 1, 3, 4]].any(), (
                            f"{name}: block 2 of layer {writer} reaches into others"
                        )
                        if layer in writer_group.layers and (layer, other) != (writer, tensor.name):
                            assert not view.any(), (
                                f"{name}: {writer}.{tensor.name} overlaps {layer}.{other}"
                            )
                assert views[writer][tensor.name][2].all()


def test_groups_share_the_bytes_of_a_block_id() -> None:
    """The pool gives a block id to one group at a time, so all groups share the memory."""
    plan = PLANS["two groups of one layout"]
    views = allocate(plan, zeros)
    assert views[0]["k"].data_ptr() == views[1]["k"].data_ptr()
    assert views[2]["k"].data_ptr() == views[3]["k"].data_ptr() != views[0]["k"].data_ptr()
    packed = allocate(PLANS["two layouts in packed blocks"], zeros)
    assert packed[0]["k"].data_ptr() == packed[1]["kv"].data_ptr()


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 3),
    width=st.sampled_from([2, 8]),
    block_size=st.sampled_from([1, 4]),
    num_layers=st.integers(1, 3),
    pairs=st.lists(
        st.tuples(st.integers(0, 1), st.integers(2, 4)), max_size=3, unique_by=lambda pair: pair[1]
    ),
)
def test_copies_move_whole_blocks(
    heads: int, width: int, block_size: int, num_layers: int, pairs: list[tuple[int, int]]
) -> None:
    g = group(tuple(range(num_layers)), block_size, *plain(heads, width))
    views = allocate(plan_of(g), zeros)
    for layer, named in views.items():
        for tensor, view in named.items():
            view.copy_(
                torch.randn(
                    view.shape, generator=torch.Generator().manual_seed(layer * 2 + (tensor == "k"))
                )
            )
    before = {
        (layer, name): view.clone()
        for layer, named in views.items()
        for name, view in named.items()
    }
    source, destination = (
        torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in (0, 1)
    )
    copy_blocks(views, g, source, destination)
    for (layer, name), old in before.items():
        for block in range(NUM_BLOCKS):
            origin = next((a for a, b in pairs if b == block), block)
            assert torch.equal(views[layer][name][block], old[origin])


def test_the_profile_run_takes_one_block() -> None:
    """Layers with equal specs share the block, and every layer has its own view."""
    one = KVCacheSpec(tensors=plain())
    other = KVCacheSpec(tensors=(KVTensor("kv", (8,), "bfloat16"),))
    plan = null_plan({0: one, 1: other, 2: one}, 4)
    assert [group.layers for group in plan.groups] == [(0, 2), (1,)]
    views = allocate(plan, zeros)
    assert views[0]["k"].shape == views[2]["v"].shape == (1, 4, 2, 4) and views[1]["kv"].shape == (
        1,
        4,
        8,
    )
    views[0]["k"].fill_(1)
    assert not views[2]["k"].any()


@pytest.mark.parametrize("max_model_len", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 3, 64])
def test_trial_steps_stay_within_the_limits(
    max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
    limits = fake_limits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    steps = list(trial_steps(limits, 2))
    for step in steps:
        assert step.num_rows <= max_num_seqs
        assert step.num_tokens <= max_num_batched_tokens
        assert (step.num_computed_tokens + step.num_scheduled_tokens <= max_model_len).all()
    started = [new.row for step in steps for new in step.new]
    assert started and sorted(steps[-1].removed_rows.tolist()) == started
    if min(max_model_len, max_num_batched_tokens) > 4 and max_num_seqs > 1:
        kinds = [(bool(step.new), bool(step.num_computed_tokens.any())) for step in steps[:-1]]
        assert kinds == [(True, False), (True, True), (False, True)], (
            "a prompt, a prompt and a decode, decodes"
        )


def test_a_state_fits_its_region_if_its_group_has_fewer_layers() -> None:
    """Four states of 1000 bytes and five layers of attention: five regions of at least 1000 bytes,
    and floats are aligned."""
    state = KVCacheSpec(
        tensors=(KVTensor("s", (249,), "float32"), KVTensor("c", (2,), "bfloat16")),
        retain=State(),
        unit="request",
    )
    specs = {i: state if i < 4 else fake_kv_spec(slot_bytes=3) for i in range(9)}
    plan = plan_kv(specs, 100_000, fake_limits(block_size=16, max_model_len=128))
    assert [len(group.layers) for group in plan.groups] == [4, 5] and plan.block_bytes == 5 * 1000
    views = allocate(plan, lambda size: torch.zeros(size, dtype=torch.uint8))
    views[3]["s"][1] = 1.0
    assert not views[7]["kv"][2:].any() and views[7]["kv"][1].any()
    assert capacity(plan) == "5,760 tokens and states, which the prefix cache does not keep"


@given(
    num_groups=st.integers(1, 3),
    block_size=st.sampled_from([4, 16]),
    max_model_len=st.integers(1, 900),
    budget=st.integers(1, 900),
)
def test_a_prompt_of_random_tokens_has_blocks_of_its_own(
    num_groups: int, block_size: int, max_model_len: int, budget: int
) -> None:
    specs = {index: KVCacheSpec(tensors=plain(heads=1 + index)) for index in range(num_groups)}
    limits = fake_limits(
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=1,
        block_size=block_size,
        vocab_size=50,
    )
    (plan, batch) = random_prompt(specs, limits)
    (_, again) = random_prompt(specs, limits)
    (new,) = batch.new
    length = len(new.token_ids)
    assert length == min(512, max_model_len, budget) == batch.num_scheduled_tokens.sum()
    assert new.token_ids.min() >= 0 and new.token_ids.max() < 50
    assert new.token_ids.tolist() == again.new[0].token_ids.tolist()
    used = [block for ids in new.block_ids for block in ids.tolist()]
    assert len(new.block_ids) == len(plan.groups) == num_groups
    assert (
        len(used) == len(set(used)) == num_groups * -(-length // block_size)
        and sorted(used)[-1] < plan.num_blocks
    )
