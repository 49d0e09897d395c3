"""Contract tests of the kind `model`, for decoders whose layers have attention over keys and
values. A plugin's test file:

class TestMyModel(ModelContract):
    config = {"hidden_size": 16, "num_hidden_layers": 2, …}
    wrong_values = {"hidden_size": "16"}

    def model(self, config: Mapping[str, Any], build: Build) -> Model:
        return MyModel(config, build)

    def checkpoint(self) -> dict[str, Tensor]:
        return {"model.embed_tokens.weight": torch.randn(29, 16), …}

    def logits(self, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        …  # the formulas of the model in plain torch, or another implementation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.attention import AttentionLayer
from pegboard.interfaces.model import Model
from pegboard.layers import Build
from pegboard_testing.attention_reference import paged_attention
from pegboard_testing.fake_build import fake_build, load_layers


class Memory:
    """The keys and values of one request, which the attention of all layers reads. It stands for
    the paged KV cache."""

    def __init__(self, layers: Mapping[int, AttentionLayer]) -> None:
        for index, layer in layers.items():
            assert layer.latent is None and layer.encoder_tokens is None and not layer.encoder, (
                f"layer {index}: this contract knows attention over keys and values; compare other "
                "models with `fake_build` and an attention of your own"
            )
        self._layers = layers
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(self, index: int) -> Callable[..., Tensor]:
        """Return what a worker binds for a layer: (q [T, H, D], k, v [T, K, D]) → [T, H · Dv]."""
        layer = self._layers[index]

        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            source = index if layer.shares_kv_with is None else layer.shares_kv_with
            if k is not None and v is not None:
                before = self._stored.get(index)
                stored = (
                    (k, v)
                    if before is None
                    else (torch.cat([before[0], k]), torch.cat([before[1], v]))
                )
                self._stored[index] = stored
            keys, values = self._stored[source]
            out = paged_attention(
                q,
                keys[None],
                values[None],
                torch.zeros(1, 1, dtype=torch.int64),
                torch.tensor([0, len(q)]),
                torch.tensor([len(keys)]),
                layer.scale,
                layer.window,
                layer.soft_cap,
                layer.chunk,
                layer.sinks,
            )
            return out.flatten(1)

        return attend


class ModelContract:
    """Every decoder passes these. Override `config`, `model`, `checkpoint` and `logits`.
    wrong_values: for the config, each of which must be refused. tolerance: of the logits."""

    config: Mapping[str, Any]
    wrong_values: Mapping[str, Any] = {}
    tolerance = 1e-4

    def model(self, config: Mapping[str, Any], build: Build) -> Model:
        """Return a new model."""
        raise AssertionError("override ModelContract.model")

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors of a small checkpoint by name, with the same numbers in each call."""
        raise AssertionError("override ModelContract.checkpoint")

    def logits(self, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        """Compute the logits [T, V] of one request with the token ids [T], in another way."""
        raise AssertionError("override ModelContract.logits")

    def ids(self) -> Tensor:
        """Return a prompt [T] of the vocabulary, with a token that occurs twice."""
        size = int(self.config["vocab_size"])
        ids = torch.randint(size, (11,), generator=torch.Generator().manual_seed(1))
        ids[7] = ids[2]
        return ids

    def loaded(self) -> tuple[Model, Build]:
        """Return a model with the weights of the checkpoint."""
        build = fake_build()
        model = self.model(self.config, build)
        weights = self.checkpoint()
        used = load_layers(build.declared.layers, weights, bind=False)
        unused = sorted(weights.keys() - used)
        assert not unused, f"tensors of the checkpoint that the model does not read: {unused}"
        return model, build

    def start(self, build: Build) -> None:
        """Bind the layers to the memory of a new request."""
        memory = Memory(build.declared.attention)
        build.attention.update({at: memory.attention(at) for at in build.declared.attention})
        for layer in build.declared.layers:
            layer.bind()

    def computed(self, model: Model, build: Build, sizes: Sequence[int]) -> Tensor:
        """Return the logits of the prompt, computed in steps of these sizes."""
        self.start(build)
        parts = []
        start = 0
        for part in self.ids().split(list(sizes)):
            positions = torch.arange(start, start + len(part))
            start += len(part)
            assert not build.declared.inputs and not build.declared.axes, (
                "this contract does not know more inputs or axes of positions"
            )
            hidden = model.forward(model.embed(part).clone(), positions)
            parts.append(model.logits(hidden))
        return torch.cat(parts)

    def test_the_constructor_allocates_no_weights(self) -> None:
        """Their memory belongs to the quantization method, which knows how they are stored."""
        model = self.model(self.config, fake_build())
        assert isinstance(model, nn.Module)
        names = [name for name, _ in model.named_parameters()]
        assert not names, f"the model has parameters of its own: {names}"

    def test_the_logits_are_those_of_the_other_implementation(self) -> None:
        model, build = self.loaded()
        logits = self.computed(model, build, [len(self.ids())])
        expected = self.logits(self.checkpoint(), self.ids())
        assert logits.dtype == torch.float32, f"logits are float32, found {logits.dtype}"
        torch.testing.assert_close(logits, expected, atol=self.tolerance, rtol=self.tolerance)

    @pytest.mark.parametrize("first", [1, 4, 10])
    def test_chunks_give_the_same_logits(self, first: int) -> None:
        """A prompt is computed in steps, and then token by token: a model keeps nothing between
        calls, and reads the positions that it is given."""
        model, build = self.loaded()
        num_tokens = len(self.ids())
        whole = self.computed(model, build, [num_tokens])
        rest = num_tokens - first
        for sizes in ([first, rest], [first, *[1] * rest]):
            parts = self.computed(model, build, sizes)
            torch.testing.assert_close(parts, whole, atol=self.tolerance, rtol=self.tolerance)

    def test_rows_do_not_see_each_other_outside_attention(self) -> None:
        """The logits of chosen rows are those of all rows."""
        model, build = self.loaded()
        self.start(build)
        ids = self.ids()
        hidden = model.forward(model.embed(ids).clone(), torch.arange(len(ids)))
        rows = torch.tensor([0, len(ids) - 1])
        torch.testing.assert_close(
            model.logits(hidden[rows].clone()), model.logits(hidden.clone())[rows]
        )

    def test_wrong_values_are_refused_by_name(self) -> None:
        for name, value in self.wrong_values.items():
            with pytest.raises(ModelError, match=name):
                self.model({**self.config, name: value}, fake_build())

    def test_a_config_without_sizes_is_refused(self) -> None:
        with pytest.raises(ModelError):
            self.model({}, fake_build())
