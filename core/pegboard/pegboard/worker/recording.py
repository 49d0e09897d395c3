"""Records a model's forward and its output head once, so that steps replay them instead of running Python layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from pegboard.errors import CannotRecord
from pegboard.interfaces.kernel import Program, Recorder
from pegboard.layers.embedding import Embedding
from pegboard.layers.layer import Layer


@dataclass(frozen=True, slots=True)
class Recording:
    """What could be recorded of a model. takes_token_ids: the embedding too; has_logits: the output head, for up to max_rows
    rows. refusals: why something could not."""

    program: Program
    has_forward: bool
    takes_token_ids: bool
    has_logits: bool
    max_rows: int
    refusals: tuple[str, ...] = ()


def record(
    model: Any, layers: Sequence[Layer], make_recorder: Callable[[int], Recorder], max_tokens: int, max_rows: int
) -> Recording:
    """The program of the model's embedding, forward and output head, as much of it as its layers and the recorder's package can.
    The bound `layers` are asked to record themselves instead of computing. Raises CannotRecord when nothing can."""
    recorder, refusals = make_recorder(max_tokens), []
    size = _hidden_size(model, layers)
    takes_token_ids = has_forward = True
    try:
        hidden = _from_token_ids(model, layers, recorder)
        if hidden is None:
            takes_token_ids = False
            with _recording(model, layers, recorder):
                hidden = model.forward(recorder.hidden(size), None)
    except CannotRecord as refusal:
        refusals.append(f"the forward runs eagerly: {refusal}")
        has_forward = takes_token_ids = False
        recorder = make_recorder(max_rows)
        hidden = recorder.hidden(size)
    try:
        with _recording(model, layers, recorder):
            logits = model.logits(recorder.head(hidden, max_rows))
    except CannotRecord as refusal:
        refusals.append(f"the output head runs eagerly: {refusal}")
        logits = None
    if logits is None and not has_forward:
        raise CannotRecord("; ".join(refusals))
    program = recorder.finish(hidden, logits)
    return Recording(program, has_forward, takes_token_ids, logits is not None, max_rows, tuple(refusals))


def _from_token_ids(model: Any, layers: Sequence[Layer], recorder: Recorder) -> Any:
    """Embedding and forward; None where the embedding cannot be recorded, or the forward: then that says so itself."""
    with _recording(model, layers, recorder):
        try:
            hidden = model.embed(recorder.token_ids())
            recorder.enter(hidden)
            return model.forward(hidden, None)
        except (TypeError, AttributeError, CannotRecord):
            return None


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
