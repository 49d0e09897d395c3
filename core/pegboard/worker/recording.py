"""Records a model's forward and its output head once, so that steps replay them instead of running Python layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from pegboard.errors import CannotRecord
from pegboard.interfaces.kernel import Recorder
from pegboard.layers.embedding import Embedding
from pegboard.layers.layer import Layer

Program = Callable[[Tensor, Tensor | None], Tensor]
"""(token ids [T] or hidden [T, size], positions [T]) → hidden [T, size] or logits [T, vocabulary], valid until the next call."""


def record_forward(model: Any, layers: Sequence[Layer], recorder: Recorder) -> tuple[Program, bool]:
    """The program of `model.embed` and `model.forward`, whose bound `layers` are asked to record themselves instead of computing;
    False beside it when only the forward could be recorded, and the program takes no token ids. Raises CannotRecord with what
    stands in the way."""
    size = _hidden_size(model, layers)
    with _recording(model, layers, recorder):
        try:
            hidden = model.embed(recorder.token_ids())
            recorder.enter(hidden)
            return recorder.finish(model.forward(hidden, None)), True
        except (TypeError, AttributeError, CannotRecord):  # to be said again if it is not the embedding
            return recorder.finish(model.forward(recorder.hidden(size), None)), False


def record_logits(model: Any, layers: Sequence[Layer], recorder: Recorder) -> Program:
    """The same of `model.logits`; the program takes hidden states and no positions."""
    size = _hidden_size(model, layers)
    with _recording(model, layers, recorder):
        return recorder.finish(model.logits(recorder.hidden(size)))


def _hidden_size(model: Any, layers: Sequence[Layer]) -> int:
    size = next((layer.width for layer in layers if isinstance(layer, Embedding)), None)
    if size is None:
        raise CannotRecord(f"{type(model).__name__} has no embedding layer that says how wide its hidden states are")
    return size


@contextmanager
def _recording(model: Any, layers: Sequence[Layer], recorder: Recorder) -> Iterator[None]:
    """Layers record instead of computing."""
    before = [(layer, layer.forward) for layer in layers if hasattr(layer, "forward")]
    try:
        for layer, _ in before:
            layer.forward = partial(layer.record, recorder)
        yield
    except (TypeError, AttributeError) as error:  # values have no tensor arithmetic: the model computes beside its layers
        raise CannotRecord(f"{type(model).__name__} computes outside of its layers: {error}") from error
    finally:
        for layer, forward in before:
            layer.forward = forward
