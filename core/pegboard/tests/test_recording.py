"""Recording a model's forward: what is handed to the recorder, and what refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from pegboard.errors import CannotRecord
from pegboard.layers.embedding import Embedding
from pegboard.layers.layer import Layer, recording
from pegboard.worker.recording import Recording, record


class ListRecorder:
    """Values are strings; recorded ops append a line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def token_ids(self) -> str:
        return "ids"

    def enter(self, hidden: str) -> None:
        self.lines.append(f"enter {hidden}")

    def hidden(self, width: int) -> str:
        self.lines.clear()
        return f"hidden[{width}]"

    def at_positions(self, tables: tuple[Tensor, ...]) -> tuple[str, ...]:
        return tuple(f"input[{table.shape[1]}]" for table in tables)

    def head(self, hidden: str, max_rows: int) -> str:
        self.lines.append(f"head {hidden}[{max_rows}]")
        return hidden

    def finish(self, output: str, logits: str | None = None) -> list[str]:
        return [*self.lines, f"return {output}, {logits}"]


class Double(Layer):
    """x → 2x, and it can be recorded."""

    def declare(self, available: object) -> list:
        return []

    def bind(self) -> None:
        self.forward = lambda x: 2 * x

    def record(self, recorder: ListRecorder, *values: str) -> str:
        recorder.lines.append(f"double {values[0]}")
        return f"d{len(recorder.lines)}"


class Stubborn(Double):
    record = Layer.record


class Model(nn.Module):
    def __init__(self, layers: list[Layer], outside: bool = False) -> None:
        super().__init__()
        self.parts, self.outside = nn.ModuleList(layers), outside

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        for layer in self.parts:
            hidden = layer(hidden)
        return hidden * 3 - 1 if self.outside else hidden


def _layers(*kinds: type[Layer]) -> list[Layer]:
    build = SimpleNamespace(path="model.layer", declared=SimpleNamespace(layers=[]))
    layers = [kind(build) for kind in kinds]  # type: ignore[arg-type]
    for layer in layers:
        layer.bind()
    return layers


def _record(model: Model, layers: list[Layer]) -> Recording:
    build = SimpleNamespace(path="model.embed", declared=SimpleNamespace(layers=[]))
    made: list[ListRecorder] = []

    def make_recorder(max_tokens: int) -> ListRecorder:
        made.append(ListRecorder())
        return made[-1]

    return record(model, [Embedding(build, 4, 8), *layers], make_recorder, 50, 4)  # type: ignore[arg-type]


def test_layers_record_in_the_order_they_are_called() -> None:
    layers = _layers(Double, Double)
    found = _record(Model(layers), layers)
    assert found.program == ["double hidden[8]", "double d1", "return d2, None"]
    assert (found.has_forward, found.takes_token_ids, found.has_logits) == (True, False, False)
    assert "the output head runs eagerly: Model computes outside of its layers" in found.refusals[0]


def test_a_program_starts_from_token_ids_and_ends_with_logits_where_these_can_be_recorded() -> None:
    layers = _layers(Double, Double, Double)
    model = Model(layers[1:2])
    model.embed, model.logits = layers[0], layers[2]
    found = _record(model, layers)
    assert found.program == ["double ids", "enter d1", "double d1", "head d3[4]", "double d3", "return d3, d5"]
    assert (found.has_forward, found.takes_token_ids, found.has_logits, found.refusals) == (True, True, True, ())


def test_what_an_embedding_recorded_before_it_refused_is_forgotten() -> None:
    layers = _layers(Double, Double, Stubborn)
    model = Model(layers[1:2])
    model.embed = nn.Sequential(layers[0], layers[2])
    found = _record(model, layers)
    assert found.program == ["double hidden[8]", "return d1, None"] and not found.takes_token_ids
    assert model.embed(torch.ones(1)).tolist() == [4]


def test_a_head_is_recorded_where_the_forward_cannot() -> None:
    layers = _layers(Stubborn, Double)
    model = Model(layers[:1])
    model.logits = layers[1]
    found = _record(model, layers)
    assert found.program == ["head hidden[8][4]", "double hidden[8]", "return hidden[8], d2"]
    assert (found.has_forward, found.has_logits) == (False, True)
    assert found.refusals == ("the forward runs eagerly: model.layer: layers of type Stubborn cannot be recorded",)
    assert model.logits(torch.ones(1)).tolist() == [2]


@pytest.mark.parametrize("refuses", [False, True])
def test_layers_compute_again_afterwards(refuses: bool) -> None:
    layers = _layers(Double, Stubborn if refuses else Double)
    model = Model(layers)
    if refuses:
        with pytest.raises(CannotRecord, match="model.layer: layers of type Stubborn"):
            _record(model, layers)
    else:
        _record(model, layers)
    assert model.forward(torch.ones(2), torch.zeros(2)).tolist() == [4, 4]


def test_arithmetic_beside_the_layers_is_refused() -> None:
    layers = _layers(Double)
    with pytest.raises(CannotRecord, match="Model computes outside of its layers"):
        _record(Model(layers, outside=True), layers)


def test_what_has_no_recorded_form_is_named() -> None:
    with pytest.raises(CannotRecord, match="a.path is computed by torch.*relu, which cannot be recorded"):
        recording(torch.nn.functional.relu, "a.path")


def test_a_model_without_an_embedding_is_refused() -> None:
    layers = _layers(Double)
    with pytest.raises(CannotRecord, match="Model has no embedding layer"):
        record(Model(layers), layers, lambda max_tokens: ListRecorder(), 50, 4)  # type: ignore[arg-type, return-value]
