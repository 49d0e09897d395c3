"""Calls that take too long are left behind, and only their completion ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from pegboard_structured_output_xgrammar import backend as xgrammar_backend
from pegboard_structured_output_xgrammar import watch as xgrammar_watch
from pegboard_structured_output_xgrammar.backend import XGrammar, XGrammarState
from pegboard_structured_output_xgrammar.limits import may_be_slow
from pegboard_structured_output_xgrammar.watch import Watch

from pegboard.errors import RequestError
from pegboard.interfaces.structured_output import Constraint
from pegboard_testing.contract_structured_output import VOCAB_SIZE, small_setup

NUM_WORDS = -(-VOCAB_SIZE // 32)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_results_and_errors_come_back_from_one_thread() -> None:
    watch = Watch()
    assert len({watch.call(threading.get_ident, 10.0) for _ in range(5)}) == 1
    with pytest.raises(ZeroDivisionError):
        watch.call(lambda: 1 // 0, 10.0)
    assert watch.call(lambda: 3, 10.0) == 3 and not watch.is_full()


def test_a_call_that_hangs_is_left_behind_with_the_lowest_priority(gate: threading.Event) -> None:
    watch = Watch()
    threads = []

    def hang() -> None:
        threads.append(threading.current_thread())
        gate.wait(30)

    for _ in range(xgrammar_watch.MAX_LEFT):
        assert not watch.is_full()
        with pytest.raises(RequestError, match=r"took over 0.1 s"):
            watch.call(hang, 0.02)
        assert watch.call(lambda: 3, 10.0) == 3
    assert watch.is_full()
    if hasattr(os, "getpriority"):
        assert all(os.getpriority(os.PRIO_PROCESS, thread.native_id) == 19 for thread in threads)
        assert os.getpriority(os.PRIO_PROCESS, 0) < 19
    gate.set()
    for thread in threads:
        thread.join(10)
    assert not watch.is_full()


class Hanging:
    """A matcher whose calls hang until `gate` is set, and then write into what they were given."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.num_calls = 0

    def accept_token(self, token: int) -> bool:
        self.num_calls += 1
        return self.gate.wait(30)

    def fill_next_token_bitmask(self, mask: np.ndarray) -> None:
        self.num_calls += 1
        self.gate.wait(30)
        mask[:] = -1


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_matcher_that_hangs_is_not_called_again(
    method: str, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = XGrammar(None, small_setup())
    quick, watched = (
        backend.compile(Constraint(*one))
        for one in (("regex", "[ab]+"), ("grammar", 'root ::= "a"'))
    )
    assert quick.watch is None and watched.watch is not None
    hostile = XGrammarState(Hanging(gate), watched.watch)
    masks = np.zeros((3, NUM_WORDS), np.uint32)
    monkeypatch.setattr(xgrammar_backend, "CALL_S", 0.02)
    for _ in range(3):
        masks[:] = 0
        with pytest.raises(RequestError, match="took over"):
            backend.fill([quick, hostile, watched], masks) if method == "fill" else hostile.accept(
                [1]
            )
    assert hostile.matcher.num_calls == 1
    masks[:] = 0
    monkeypatch.setattr(xgrammar_backend, "CALL_S", 10.0)
    gate.set()
    backend.fill([quick, watched, quick.fork()], masks)
    assert [np.bitwise_count(row).sum() for row in masks] == [3, 1, 3], "a, b and ab; a"


def test_what_is_slow_after_a_few_tokens_is_refused_when_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(xgrammar_backend, "TRIAL_S", 0.1)
    monkeypatch.setattr(XGrammar, "_try", lambda backend, matcher: time.sleep(2.0))
    backend = XGrammar(None, small_setup())
    with pytest.raises(RequestError, match="took over"):
        backend.compile(Constraint("regex", "([ab]+)+"))
    assert backend.compile(Constraint("regex", "[ab]+"))


def test_too_many_left_behind_refuse_only_what_may_be_slow(gate: threading.Event) -> None:
    backend = XGrammar(None, small_setup())
    for _ in range(xgrammar_watch.MAX_LEFT):
        with pytest.raises(RequestError):
            backend._watch.call(lambda: gate.wait(30), 0.01)
    with pytest.raises(RequestError, match="try later"):
        backend.compile(Constraint("grammar", 'root ::= "a"'))
    assert backend.compile(Constraint("json", '{"type": "integer"}')) and backend.compile(
        Constraint("regex", "a+")
    )


@pytest.mark.parametrize(
    ("kind", "text", "slow"),
    [
        ("grammar", 'root ::= root root | "a"', True),
        ("regex", r"(([a-z]+ ?)+,? ?)+\.", True),
        ("regex", "(a{1,50}){1,50}", True),
        ("regex", "a{1,500}", True),
        ("regex", r"\d{3}-\d{4}", False),
        ("regex", "(yes|no|maybe)( please)?", False),
        ("regex", "^[A-Z][a-z]+(, [A-Z])?$", False),
        ("choice", '["a", "b"]', False),
        ("json", '{"type": "object", "description": "' + "x" * 9000 + '"}', True),
        (
            "json",
            '{"type": "array", "items": {"type": "array", "maxItems": 500}, "maxItems": 500}',
            True,
        ),
        ("json", '{"type": "string", "maxLength": 100}', False),
        ("json", '{"type": "string", "pattern": "^(a+)+$"}', True),
        ("json", '{"type": "string", "pattern": "^[a-c]{2,4}$"}', False),
        ("json", '{"anyOf": [' + ", ".join(['{"type": "string"}'] * 60) + "]}", True),
        ("json", '{"anyOf": [{"type": "string"}, {"type": "null"}]}', False),
        (
            "structural_tag",
            '{"format": {"type": "grammar", "grammar": "root ::= root root"}}',
            True,
        ),
        ("structural_tag", '{"format": {"type": "regex", "pattern": "(a*)*"}}', True),
        ("structural_tag", '{"format": {"type": "const_string", "value": "a"}}', False),
    ],
)
def test_what_may_be_slow(kind: str, text: str, slow: bool) -> None:
    assert may_be_slow(Constraint(kind, text)) == slow  # type: ignore[arg-type]
