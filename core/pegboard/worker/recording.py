"""Records a model's forward and its output head once, so that steps replay them instead of running Python layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from pegboard.errors import CannotRecord
from pegboard.interfaces.kernel import Recorder
from pegboard.layers.embedding import Embedding
from pegboard.layers.layer import Layer

Program = Callable[[Tensor, Tensor | None], Tensor]
"""(hidden [T, size], positions [T]) → hidden [T, size] or logits [T, vocabulary], valid until the next call."""


def record_forward(model: Any, layers: Sequence[Layer], recorder: Recorder) -> Program:
    """The program of `model.forward`, whose bound `layers` are asked to record themselves instead of computing.
    Raises CannotRecord with what stands in the way."""
    return _record(model, layers, recorder, lambda hidden: model.forward(hidden, None))


def record_logits(model: Any, layers: Sequence[Layer], recorder: Recorder) -> Program:
    """The same of `model.logits`; the program takes no positions."""
    return _record(model, layers, recorder, model.logits)


def _record(model: Any, layers: Sequence[Layer], recorder: Recorder, compute: Callable[[Any], Any]) -> Program:
    size = next((layer.width for layer in layers if isinstance(layer, Embedding)), None)
    if size is None:
        raise CannotRecord(f"{type(model).__name__} has no embedding layer that says how wide its hidden states are")
    before = [(layer, layer.forward) for layer in layers if hasattr(layer, "forward")]
    try:
        for layer, _ in before:
            layer.forward = partial(layer.record, recorder)
        output = compute(recorder.hidden(size))
    except (TypeError, AttributeError) as error:  # values have no tensor arithmetic: the model computes beside its layers
        raise CannotRecord(f"{type(model).__name__} computes outside of its layers: {error}") from error
    finally:
        for layer, forward in before:
            layer.forward = forward
    return recorder.finish(output)
