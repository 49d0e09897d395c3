"""What a rank answers: the pickle of (kind, value)."""

from __future__ import annotations

import logging
import pickle

from pegboard.data.batch import StepOutput
from pegboard.errors import PegboardError, is_failure, portable
from pegboard.log import get_logger

log = get_logger(__name__)


def dumped(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def answer_of(kind: str, value: object) -> bytes:
    """Return an answer, or that of an error if the value cannot be pickled."""
    try:
        return dumped((kind, value))
    except Exception as error:  # noqa: BLE001 - any code may run here
        name = type(value).__name__
        message = f"the answer of a worker cannot be sent to the engine: a {name}: {error}"
        return error_of(PegboardError(message))


def error_of(error: BaseException) -> bytes:
    """Return an error as an answer, and log its traceback, which the engine's process cannot have.
    Exits are raised."""
    if not is_failure(error):
        raise error
    is_plain = isinstance(error, PegboardError) and error.__cause__ is None
    log.log(logging.DEBUG if is_plain else logging.ERROR, "the worker failed", exc_info=error)
    return dumped(("error", portable(error)))


def result_of(output: StepOutput, answers: bool) -> tuple[str, object] | None:
    """Return the kind and the value of what the engine wants to know of a step. None = nothing.
    answers: this rank has the results of steps."""
    if answers:
        return "answer", output
    if any(each.saved or each.loaded or each.failed for each in output.transfers.values()):
        return "transfers", output.transfers
    return None
