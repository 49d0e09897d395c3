"""Answers of ranks, and the first death."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.batch import CSR, StepOutput, TransferReport
from pegboard.errors import EngineDeadError, ModelError, PegboardError
from pegboard.interfaces.executor import WorkerDeath
from pegboard_executors.answers import answer_of, error_of, result_of
from pegboard_executors.deaths import FirstDeath
from pegboard_executors.questions import Question, Step


def output(**transfers: TransferReport) -> StepOutput:
    return StepOutput(
        step=1, rows=np.zeros(0, np.int32), token_ids=CSR.empty(), transfers=transfers
    )


def test_only_one_rank_answers_a_step_and_others_report_transfers() -> None:
    idle = output(store=TransferReport())
    busy = output(store=TransferReport(saved=["a"]))
    assert result_of(idle, True) == ("answer", idle)
    assert result_of(idle, False) is None
    assert result_of(busy, False) == ("transfers", busy.transfers)


def test_what_cannot_be_sent_is_an_error() -> None:
    kind, error = pickle.loads(answer_of("answer", threading.Lock()))
    assert kind == "error" and "a lock" in str(error)
    assert pickle.loads(answer_of("answer", 5)) == ("answer", 5)
    with pytest.raises(SystemExit):
        error_of(SystemExit(1))


@given(st.permutations(range(4)), st.integers(0, 3), st.booleans())
def test_the_cause_is_raised_whenever_it_arrives(
    order: list[int], broken: int, is_hasty: bool
) -> None:
    """The others only say that a rank did not come."""
    question = Question(4, 4, is_hasty=is_hasty)
    for rank in order:
        error = ModelError("cause") if rank == broken else EngineDeadError("it did not come")
        question.take(rank, True, error)
        if question.is_settled() and is_hasty:
            break
    assert question.is_settled()
    with pytest.raises(ModelError, match="cause"):
        question.result()


def test_answers_are_enough_when_as_many_came_as_are_needed() -> None:
    question = Question(1, 3, is_hasty=True)
    assert not question.is_settled() and question.patience_s() is None
    question.take(2, False, "result")
    assert question.is_settled() and question.result() == {2: "result"}


def test_a_step_is_waited_for_once() -> None:
    calls: list[int] = []

    def fail() -> Any:
        calls.append(1)
        raise PegboardError("it fails")

    step = Step(fail)
    for _ in range(2):
        with pytest.raises(PegboardError, match="it fails"):
            step.result()
    assert calls == [1]


def test_everyone_hears_of_the_first_death_once() -> None:
    deaths = FirstDeath()
    heard: list[Any] = []
    deaths.tell(heard.append)
    assert deaths.reason(0.0) is None
    death = WorkerDeath(2, "signal SIGKILL")
    deaths.announce(death, lambda: heard.append("woken"))
    assert heard == ["woken", death] and deaths.reason(0.0) == death
    deaths.tell(heard.append)
    assert heard[2:] == [death]
