"""Scales of a KV cache of 8-bit floats: where checkpoints keep them, what is refused, and what they
change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.attention import AttentionLayer, KVCacheSpec, KVTensor
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.layers.attention import Attention
from pegboard.worker import memory
from pegboard.worker.attention_groups import AttentionGroups
from pegboard_testing.fake_build import fake_build
from pegboard_testing.fake_limits import fake_limits

PATH = "model.layers.0.self_attn"


def attention(scales: Tensor | None) -> Attention:
    """Return a layer with 4 KV heads whose cache has these scales [2, 4]."""
    build = fake_build()
    layer = Attention(build.at(PATH), 0, 8, 4, 16)
    if scales is not None:
        known = build.declared.attention[0]
        build.declared.attention[0] = AttentionLayer(
            layer_index=0,
            num_heads=8,
            num_kv_heads=4,
            head_dim=16,
            scale=known.scale,
            k_scale=scales[0],
            v_scale=scales[1],
        )
    return layer


def load(layer: Attention, tensors: dict[str, Any]) -> list[str]:
    """Load tensors, named without the layer's path. Returns the names that the layer asks for."""
    stored = {f"{PATH}.{name}": torch.as_tensor(value) for name, value in tensors.items()}
    wanted = layer.declare(stored)
    for weight in wanted:
        tensor = stored[weight.name]
        layer.accept(WeightPiece(weight.name, str(tensor.dtype), tuple(tensor.shape), tensor))
    return [weight.name.removeprefix(f"{PATH}.") for weight in wanted]


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("kv_scale", "kv_scale"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_names_of_scales(k: str, v: str, dtype: torch.dtype) -> None:
    scales = torch.ones(2, 4)
    other = {"q_scale": torch.tensor(9.0), "k_proj.weight_scale": torch.tensor(9.0)}
    asked = load(
        attention(scales),
        {
            v: torch.tensor(0.25, dtype=dtype),
            k: torch.tensor(0.25 if k == v else 3.0, dtype=dtype),
            **other,
        },
    )
    assert asked == list(dict.fromkeys([k, v]))
    assert scales.tolist() == [[0.25 if k == v else 3.0] * 4, [0.25] * 4]


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 1, 1), (1, 4, 1, 1)])
def test_scales_per_head(shape: tuple[int, ...]) -> None:
    scales = torch.ones(2, 4)
    stored = torch.tensor([0.5, 1.0, 2.0, 4.0])
    load(attention(scales), {"k_scale": stored.view(shape), "v_scale": torch.tensor([7.0])})
    assert scales.tolist() == [stored.tolist(), [7.0] * 4]


def test_a_reload_writes_to_the_same_place() -> None:
    scales = torch.ones(2, 4)
    layer = attention(scales)
    address = scales.data_ptr()
    load(layer, {"kv_scale": torch.tensor(2.0)})
    load(layer, {"kv_scale": torch.tensor(5.0)})
    assert scales.data_ptr() == address and scales.unique().tolist() == [5.0]


def test_a_cache_without_scales_reads_none() -> None:
    assert (
        load(attention(None), {"k_scale": torch.tensor(float("nan")), "v_scale": torch.zeros(3)})
        == []
    )


@pytest.mark.parametrize(
    "wrong",
    [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0], [1.0, 2.0, 0.0, 1.0], [[1.0] * 4] * 4, []],
)
def test_a_wrong_scale_is_refused(wrong: Any) -> None:
    with pytest.raises(
        ModelError, match=r"self_attn.v_scale .*one positive number, or one for each of 4 KV heads"
    ):
        load(
            attention(torch.ones(2, 4)),
            {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(wrong)},
        )


def test_bytes_in_place_of_a_scale_are_refused() -> None:
    layer = attention(torch.ones(2, 4))
    layer.declare({f"{PATH}.kv_scale": None})
    with pytest.raises(ModelError, match="kv_scale"):
        layer.accept(WeightPiece(f"{PATH}.kv_scale", "Q4_0", (32,), memoryview(bytes(18))))


@pytest.mark.parametrize("name", ["k_scale", "v_proj.v_scale"])
def test_a_scale_alone_is_refused(name: str) -> None:
    with pytest.raises(
        ModelError, match=f"has {PATH}.{name}, but needs scales for keys and values"
    ):
        load(attention(torch.ones(2, 4)), {name: torch.tensor(1.0)})


def groups_of(layer: AttentionLayer) -> AttentionGroups:
    groups = object.__new__(AttentionGroups)
    groups.layers = {0: layer}
    groups.entries = {}
    return groups


def test_calculated_scales_are_set_before_the_layer_stores() -> None:
    """The largest key becomes 200, and the largest value 100."""
    scales = torch.ones(2, 4)
    seen = []
    layer = AttentionLayer(
        layer_index=0,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        scale=1.0,
        k_scale=scales[0],
        v_scale=scales[1],
    )
    call = groups_of(layer).setting_scales({0: lambda q, k, v: seen.append(scales.clone())})[0]
    keys = torch.zeros(3, 4, 16)
    values = torch.zeros(3, 4, 16)
    keys[1, 2, 3] = -500.0
    values[2, 0, 1] = 7.0
    call(None, keys, values)
    assert seen[0].tolist() == [[2.5] * 4, [torch.tensor(0.07).item()] * 4]
    call(None, None, None)
    assert torch.equal(seen[1], seen[0]), "a layer that stores nothing changes nothing"
    call(None, torch.zeros_like(keys), values)
    assert scales[0].tolist() == [1.0] * 4, "a scale is never 0"


def test_the_layout_names_the_scales() -> None:
    def layout(k: float, v: float) -> str:
        scales = torch.tensor([[k] * 4, [v] * 4])
        layer = AttentionLayer(
            layer_index=0,
            num_heads=8,
            num_kv_heads=4,
            head_dim=16,
            scale=1.0,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        return groups_of(layer).layout()

    assert len({layout(1, 1), layout(1, 2), layout(2, 1), layout(1, 1)}) == 3
    plain = AttentionLayer(layer_index=0, num_heads=8, num_kv_heads=4, head_dim=16, scale=1.0)
    assert "scales" not in groups_of(plain).layout()


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(1, 1), (40, 3), (4096, 32)])
def test_the_random_prompt_has_its_own_blocks_in_every_group(
    max_model_len: int, num_blocks: int
) -> None:
    def spec(dim: int) -> KVCacheSpec:
        return KVCacheSpec(tensors=(KVTensor("k", (1, dim), "float32"),))

    limits = fake_limits(
        max_model_len=max_model_len, max_num_batched_tokens=2048, block_size=16, vocab_size=50
    )
    plan, batch = memory.random_prompt({0: spec(8), 1: spec(16)}, limits)
    [request] = batch.new
    blocks = np.concatenate(request.block_ids)
    assert plan.num_blocks == len(blocks) == 2 * num_blocks and sorted(blocks) == list(
        range(len(blocks))
    )
    assert len(request.token_ids) == min(max_model_len, 512) and request.token_ids.max() < 50
    assert np.array_equal(
        request.token_ids, memory.random_prompt({0: spec(8)}, limits)[1].new[0].token_ids
    )
