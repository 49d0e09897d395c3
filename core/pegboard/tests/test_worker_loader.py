"""Loading a model from a checkpoint: every layer gets its pieces and is finished once, and an error
names missing weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload, WeightPiece
from pegboard.layers import Layer, Linear, Norm
from pegboard.worker.model_loader import fill_layers
from pegboard_testing.fake_build import FakeLoader, FakeWeight, fake_build


def checkpoint_of(loader: FakeLoader) -> Checkpoint:
    return Checkpoint(
        format="memory",
        path=Path("model"),
        config={},
        architectures=("X",),
        tensors=loader.index(),
        tokenizer=TokenizerPayload("hf"),
    )


def tensors_of(num_layers: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    found = {}
    for index in range(num_layers):
        found[f"l{index}.a.weight"] = torch.randn(3, 4, generator=random)
        found[f"l{index}.b.weight"] = torch.randn(2, 4, generator=random)
        found[f"l{index}.n.weight"] = torch.randn(4, generator=random)
    return found


def load(layers: Iterable[Layer], loader: FakeLoader) -> None:
    checkpoint = checkpoint_of(loader)
    fill_layers({layer: layer.declare(checkpoint.tensors) for layer in layers}, loader, checkpoint)


class Shuffled(FakeLoader):
    """Delivers the weights in a different order, as files do."""

    def __init__(self, tensors: dict[str, Tensor], seed: int) -> None:
        super().__init__(tensors)
        self.seed = seed

    def tensors(self, checkpoint: object, wanted: object) -> Iterator[WeightPiece]:
        pieces = list(super().tensors(checkpoint, wanted))  # type: ignore[arg-type]
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(self.seed))
        yield from (pieces[index] for index in order.tolist())


@settings(max_examples=25, deadline=None)
@given(num_layers=st.integers(1, 4), seed=st.integers(0, 99))
def test_any_order_of_delivery_fills_every_layer(num_layers: int, seed: int) -> None:
    tensors = tensors_of(num_layers)
    build = fake_build()
    linears = [Linear(build.at(f"l{i}"), 4, 5, parts={"a": 3, "b": 2}) for i in range(num_layers)]
    norms = [Norm(build.at(f"l{i}").at("n"), 4, 1e-5) for i in range(num_layers)]
    loader = Shuffled(tensors, seed)
    load(build.declared.layers, loader)
    for layer in build.declared.layers:
        layer.bind()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    for index, (linear, norm) in enumerate(zip(linears, norms, strict=True)):
        matrix = torch.cat([tensors[f"l{index}.a.weight"], tensors[f"l{index}.b.weight"]])
        torch.testing.assert_close(linear(x), x @ matrix.T)
        assert isinstance(linear.method, FakeWeight) and linear.method.num_finishes == 1
        assert torch.equal(norm.weight.data, tensors[f"l{index}.n.weight"])


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (8, r"l06\.weight, l07\.weight$"),
        (9, r"l07\.weight and 1 more$"),
        (12, r"l00\.weight, .*l07\.weight and 4 more$"),
    ],
)
def test_missing_tensors_are_named_and_counted(count: int, told: str) -> None:
    build = fake_build()
    loader = FakeLoader({"other.weight": torch.ones(1)})
    layers = [Linear(build.at(f"l{i:02}"), 4, 3) for i in range(count)]
    with pytest.raises(ModelError, match=rf"model lacks {count} tensors .*: .*{told}"):
        load(layers, loader)


def test_a_loader_that_forgets_is_found_out() -> None:
    class Forgetful(FakeLoader):
        def tensors(self, checkpoint: object, wanted: object) -> Iterator[WeightPiece]:
            return iter(())

    build = fake_build()
    loader = Forgetful({"a.weight": torch.ones(3, 4)})
    with pytest.raises(ModelError, match=r"did not deliver: a\.weight"):
        load([Linear(build.at("a"), 4, 3)], loader)


@pytest.mark.parametrize("data", [torch.ones(2, 4), memoryview(b"1234")])
def test_a_norm_that_does_not_fit_is_refused_by_name(data: object) -> None:
    norm = Norm(fake_build().at("n"), 4, 1e-5)
    norm.declare({})
    with pytest.raises(ModelError, match=r"n\.weight"):
        norm.accept(WeightPiece("n.weight", "Q4_1", (4,), data))  # type: ignore[arg-type]


def test_a_shape_that_does_not_fit_is_noticed_before_anything_is_loaded() -> None:
    build = fake_build()
    loader = FakeLoader({"l0.a.weight": torch.zeros(3, 4)})
    Linear(build.at("l0"), 4, 2**20, parts={"a": 2**20})
    with pytest.raises(
        ModelError, match=r"l0\.a\.weight has shape \[3, 4\]; the model expects \[1048576, 4\]"
    ):
        load(build.declared.layers, loader)
